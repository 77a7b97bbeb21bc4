// Dispatch from run-time values to the arguments of a kernel template.
#pragma once

#include "ops/cuda/common.cuh"

#include <type_traits>

namespace llaisys::ops::cuda {

// Calls f(T{}) with T = f16 or bf16; throws for any other dtype.
template <typename F> void dispatch_half(DType dtype, F &&f) {
    switch (dtype) {
    case LLAISYS_DTYPE_F16:
        return f(f16{});
    case LLAISYS_DTYPE_BF16:
        return f(bf16{});
    default:
        fail(LLAISYS_ERROR_INTERNAL, "no 16-bit kernel for ", name_of(dtype));
    }
}

// Calls f(std::integral_constant) with the one of Values that equals value.
template <int... Values, typename F> void dispatch_int(int64_t value, F &&f) {
    const bool is_found =
        ((value == Values && (f(std::integral_constant<int, Values>{}), true)) || ...);
    ensure(is_found, "no kernel for ", value);
}

} // namespace llaisys::ops::cuda
