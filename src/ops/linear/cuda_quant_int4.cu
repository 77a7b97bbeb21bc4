// Kernels of linear with weights in int4.
#include "ops/cuda/quant_gemm.cuh"

namespace llaisys::ops::cuda {

LLAISYS_QUANT_GEMM(QuantCodes::int4, LinearEpilogue)

} // namespace llaisys::ops::cuda
