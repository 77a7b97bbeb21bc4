// Kernels of linear with weights in f8.
#include "ops/cuda/quant_gemm.cuh"

namespace llaisys::ops::cuda {

LLAISYS_QUANT_GEMM(QuantCodes::f8, LinearEpilogue)

} // namespace llaisys::ops::cuda
