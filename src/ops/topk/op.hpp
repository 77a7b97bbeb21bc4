// The largest value, and the k largest, of each row. Contracts: llaisysArgmax, llaisysTopK.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

// Pinned host memory that also receives the results, [rows] each, in stream order.
struct ArgmaxOnHost {
    int64_t *index = nullptr; // null: no copy
    float *value = nullptr;
};

void argmax(const device::Stream &stream, const Tensor &max_index, const Tensor &max_value,
            const Tensor &values, const ArgmaxOnHost &host = {});
decltype(argmax) argmax_cpu, argmax_cuda;

void topk(const device::Stream &stream, const Tensor &index, const Tensor &value,
          const Tensor &values);
decltype(topk) topk_cpu, topk_cuda;

} // namespace llaisys::ops
