#include "device/cuda/kernel_arch.hpp"

#include "device/cuda/cuda_runtime.hpp"

namespace llaisys::device {

namespace {

__global__ void nothing_kernel() {}

} // namespace

int kernel_arch_major() {
    cudaFuncAttributes attributes{};
    LLAISYS_CUDA(
        cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(nothing_kernel)));
    return attributes.ptxVersion / 10;
}

} // namespace llaisys::device
