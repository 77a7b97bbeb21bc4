// Kernels of decoder layers with weights in int4.
#include "ops/cuda/quant_gemm.cuh"
#include "ops/decoder_layer/cuda_epilogues.cuh"

namespace llaisys::ops::cuda {

LLAISYS_QUANT_GEMM(bf16, QuantCodes::int4, QkvEpilogue)
LLAISYS_QUANT_GEMM(f16, QuantCodes::int4, QkvEpilogue)
LLAISYS_QUANT_GEMM(bf16, QuantCodes::int4, SwigluEpilogue)
LLAISYS_QUANT_GEMM(f16, QuantCodes::int4, SwigluEpilogue)
LLAISYS_QUANT_TMA(QuantCodes::int4, QkvEpilogue)
LLAISYS_QUANT_TMA(QuantCodes::int4, SwigluEpilogue)

} // namespace llaisys::ops::cuda
