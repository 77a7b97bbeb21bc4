// Dispatch from a run-time dtype to the C++ type of a kernel template.
#pragma once

#include "ops/cuda/common.cuh"

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

} // namespace llaisys::ops::cuda
