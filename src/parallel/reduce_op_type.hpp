// Reduction operators of collectives.
#pragma once

#include <cstdint>

namespace llaisys::parallel::function {

// kAvg is the sum divided by the number of ranks (truncated for integers). Integers wrap. kMin and
// kMax keep the value of the lower rank unless the other compares strictly less or greater.
enum class ReduceOpType : int8_t { kSum, kProd, kMin, kMax, kAvg };

} // namespace llaisys::parallel::function
