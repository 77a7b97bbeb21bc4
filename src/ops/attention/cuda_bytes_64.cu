#include "ops/attention/cuda_bytes.cuh"

namespace llaisys::ops::cuda {

void decode_bytes_64(const ByteDecode &decode) { decode_bytes<64>(decode); }

} // namespace llaisys::ops::cuda
