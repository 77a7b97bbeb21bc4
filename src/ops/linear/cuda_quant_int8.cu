// Kernels of linear with weights in int8.
#include "ops/cuda/quant_gemm.cuh"

namespace llaisys::ops::cuda {

LLAISYS_QUANT_GEMM(QuantCodes::int8, LinearEpilogue)

} // namespace llaisys::ops::cuda
