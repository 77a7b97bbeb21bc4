// Kernels of decoder layers with weights in int8.
#include "ops/cuda/quant_gemm.cuh"
#include "ops/decoder_layer/cuda_epilogues.cuh"

namespace llaisys::ops::cuda {

LLAISYS_QUANT_GEMM(QuantCodes::int8, QkvEpilogue)
LLAISYS_QUANT_GEMM(QuantCodes::int8, SwigluEpilogue)

} // namespace llaisys::ops::cuda
