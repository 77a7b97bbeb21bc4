#include "ops/attention/cuda_bytes.cuh"

namespace llaisys::ops::cuda {

void decode_bytes_192(const ByteDecode &decode) { decode_bytes<192>(decode); }
void decode_bytes_256(const ByteDecode &decode) { decode_bytes<256>(decode); }

} // namespace llaisys::ops::cuda
