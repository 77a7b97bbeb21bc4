// gemm_swiglu_m256.cuh in bf16.
#include "ops/cuda/gemm_swiglu_m256.cuh"

namespace llaisys::ops::cuda {

template void run_gemm_swiglu_m256<bf16>(const device::CudaStream &, const SwigluGemm<bf16> &, int);

} // namespace llaisys::ops::cuda
