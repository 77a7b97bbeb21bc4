// Small copies at the start and end of a step, between pinned host memory and the device. Devices
// that can access pinned memory use kernels, in stream order, so that only kernels run between two
// steps: a copy engine costs 5 us to start and 5 us to finish.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

// Tokens sampled by the previous step: tokens[i] = sampled[sources[i]] where sources[i] is not
// negative, else the uploaded value. tokens i64 [n] and sources i32 [n] are part of the uploaded
// data, aligned to 16 bytes; sampled i64 [m], each source below m.
struct SampledTokens {
    Tensor tokens, sources, sampled;
};

// Copy `from` to `to`, both of `bytes` bytes, a multiple of 16, aligned to 16 bytes; on the CPU
// they may be the same memory. `from` may be overwritten when all work now on the stream is
// complete.
void bring_in(const device::Stream &stream, std::byte *to, const std::byte *from, int64_t bytes,
              const SampledTokens *sampled = nullptr);
decltype(bring_in) bring_in_cuda;
// The same in the other direction.
void bring_out(const device::Stream &stream, std::byte *to, const std::byte *from, int64_t bytes);
decltype(bring_out) bring_out_cuda;

} // namespace llaisys::ops
