// The largest value of each row. Contract: llaisysArgmax.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

// Page-locked memory of the host that gets the results as well, [rows] each, in order with the stream.
struct ArgmaxOnHost {
    int64_t *index = nullptr; // null: nothing goes there
    float *value = nullptr;
};

void argmax(const device::Stream &stream, const Tensor &max_index, const Tensor &max_value,
            const Tensor &values, const ArgmaxOnHost &host = {});

} // namespace llaisys::ops
