// Kernels of decoder layers with weights in int4.
#include "ops/cuda/quant_gemm.cuh"
#include "ops/decoder_layer/cuda_epilogues.cuh"

namespace llaisys::ops::cuda {

LLAISYS_QUANT_GEMM(QuantCodes::int4, QkvEpilogue)
LLAISYS_QUANT_GEMM(QuantCodes::int4, SwigluEpilogue)

} // namespace llaisys::ops::cuda
