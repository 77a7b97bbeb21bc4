// How a collective combines the values of its ranks.
#pragma once

#include <cstdint>

namespace llaisys::parallel::function {

// kAvg is the sum divided by the number of ranks (truncated for integers). Integers wrap. kMin and
// kMax keep the value of the lower rank unless the other is really below or above it.
enum class ReduceOpType : int8_t { kSum, kProd, kMin, kMax, kAvg };

} // namespace llaisys::parallel::function
