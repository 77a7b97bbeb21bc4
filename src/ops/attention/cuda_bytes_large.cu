#include "ops/attention/cuda_bytes.cuh"

namespace llaisys::ops::cuda {

template void decode_bytes<192>(const ByteDecode &);
template void decode_bytes<256>(const ByteDecode &);

} // namespace llaisys::ops::cuda
