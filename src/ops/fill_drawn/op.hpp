// Tokens that the step before drew: out[i] = drawn[source[i]] wherever source[i] is not negative; the
// rest of out stays as it is. out i64 [n], drawn i64 [m], source i32 [n], each below m.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

void fill_drawn(const device::Stream &stream, const Tensor &out, const Tensor &drawn,
                const Tensor &source);

} // namespace llaisys::ops
