#include "ops/moe/cuda_quant.cuh"

namespace llaisys::ops::cuda {

LLAISYS_MOE_QUANT(bf16, QuantCodes::int4)
LLAISYS_MOE_QUANT(f16, QuantCodes::int4)

} // namespace llaisys::ops::cuda
