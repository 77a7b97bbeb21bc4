#include "ops/attention/cuda_bytes.cuh"

namespace llaisys::ops::cuda {

void decode_bytes_80(const ByteDecode &decode) { decode_bytes<80>(decode); }
void decode_bytes_96(const ByteDecode &decode) { decode_bytes<96>(decode); }
void decode_bytes_112(const ByteDecode &decode) { decode_bytes<112>(decode); }

} // namespace llaisys::ops::cuda
