// The arithmetic of reductions on one element, shared by the CPU and the kernels over peer memory.
#pragma once

#include "base/host_device.hpp"
#include "parallel/reduce_op_type.hpp"

#include <type_traits>

namespace llaisys::parallel {

// Accumulator type: f32 for floats, unsigned for integers (overflow wraps).
template <typename T>
using Wide =
    std::conditional_t<std::is_integral_v<T>,
                       std::make_unsigned_t<std::conditional_t<std::is_integral_v<T>, T, int>>,
                       float>;

template <typename T> LLAISYS_HOST_DEVICE bool is_below(Wide<T> a, Wide<T> b) {
    if constexpr (std::is_integral_v<T>) {
        return T(a) < T(b);
    } else {
        return a < b;
    }
}

template <typename T>
LLAISYS_HOST_DEVICE Wide<T> combine(Wide<T> sum, Wide<T> value, function::ReduceOpType op) {
    switch (op) {
    case function::ReduceOpType::kProd:
        return sum * value;
    case function::ReduceOpType::kMin:
        return is_below<T>(value, sum) ? value : sum;
    case function::ReduceOpType::kMax:
        return is_below<T>(sum, value) ? value : sum;
    default:
        return sum + value;
    }
}

// The reduction of n values, with kAvg divided by n.
template <typename T>
LLAISYS_HOST_DEVICE Wide<T> finish(Wide<T> sum, function::ReduceOpType op, int n) {
    if (op != function::ReduceOpType::kAvg) {
        return sum;
    }
    if constexpr (std::is_integral_v<T>) {
        return Wide<T>(T(sum) / T(n));
    } else {
        return sum / float(n);
    }
}

} // namespace llaisys::parallel
