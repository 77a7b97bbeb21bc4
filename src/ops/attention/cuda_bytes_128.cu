#include "ops/attention/cuda_bytes.cuh"

namespace llaisys::ops::cuda {

void decode_bytes_128(const ByteDecode &decode) { decode_bytes<128>(decode); }

} // namespace llaisys::ops::cuda
