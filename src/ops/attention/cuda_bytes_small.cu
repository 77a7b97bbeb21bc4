#include "ops/attention/cuda_bytes.cuh"

namespace llaisys::ops::cuda {

template void decode_bytes<80>(const ByteDecode &);
template void decode_bytes<96>(const ByteDecode &);
template void decode_bytes<112>(const ByteDecode &);

} // namespace llaisys::ops::cuda
