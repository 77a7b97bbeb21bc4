// The small copies that a step begins and ends with, between page-locked memory of the host and the
// device. Where a device can read and write that memory itself its kernels make them, in order with the
// stream and with nothing between two steps but kernels: a copy engine takes 5 us to come in and 5 to go.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

// Tokens that the step before sampled: tokens[i] = sampled[sources[i]] wherever sources[i] is not negative, and
// else what was brought in. tokens i64 [n] and sources i32 [n] are part of what is brought in, on 16 bytes;
// sampled i64 [m], each source below m.
struct SampledTokens {
    Tensor tokens, sources, sampled;
};

// `to` becomes what is in `from`, both of `bytes` bytes, a multiple of 16, and on 16 bytes; they may be the
// same memory, of the CPU. `from` may be written again when all that is on the stream now is done.
void bring_in(const device::Stream &stream, std::byte *to, const std::byte *from, int64_t bytes,
              const SampledTokens *sampled = nullptr);
// The same the other way.
void bring_out(const device::Stream &stream, std::byte *to, const std::byte *from, int64_t bytes);

} // namespace llaisys::ops
