// CUDA side of bring_in and bring_out. Arguments have been checked.
#pragma once

#include "ops/step_copies/op.hpp"

namespace llaisys::ops {

void bring_in_cuda(const device::Stream &stream, std::byte *to, const std::byte *from,
                   int64_t bytes, const SampledTokens *sampled);
void bring_out_cuda(const device::Stream &stream, std::byte *to, const std::byte *from,
                    int64_t bytes);

} // namespace llaisys::ops
