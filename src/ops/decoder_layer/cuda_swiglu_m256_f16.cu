// gemm_swiglu_m256.cuh in f16.
#include "ops/cuda/gemm_swiglu_m256.cuh"

namespace llaisys::ops::cuda {

template void run_gemm_swiglu_m256<f16>(const device::CudaStream &, const SwigluGemm<f16> &, int);

} // namespace llaisys::ops::cuda
