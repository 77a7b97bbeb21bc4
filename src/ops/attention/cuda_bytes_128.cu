#include "ops/attention/cuda_bytes.cuh"

namespace llaisys::ops::cuda {

template void decode_bytes<128>(const ByteDecode &);

} // namespace llaisys::ops::cuda
