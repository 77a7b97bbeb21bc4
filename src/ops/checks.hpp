// Argument checks of the operators, made before anything is written. Each throws
// LLAISYS_ERROR_INVALID with "operator: argument: got ..., expected ..."; texts are built on
// failure only.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

#include <initializer_list>

namespace llaisys::ops {

// Holds the operator's name and the device that its tensors must be on.
struct Checks {
    const char *op;
    const device::Stream &stream;

    // Defined and on the device of the stream.
    void device(const char *argument, const Tensor &tensor) const;

    void real(const char *argument, const Tensor &tensor) const; // f32, f16 or bf16
    void dtype(const char *argument, const Tensor &tensor, DType expected) const;
    void ndim(const char *argument, const Tensor &tensor, int expected) const;
    void shape(const char *argument, const Tensor &tensor,
               std::initializer_list<int64_t> expected) const;
    void contiguous(const char *argument, const Tensor &tensor) const;
    void dense_rows(const char *argument, const Tensor &tensor) const;
    void writable(const char *argument, const Tensor &tensor) const; // not a mapped file

    // device + real + ndim + dense rows, and writable for an output.
    void real_rows(const char *argument, const Tensor &tensor, int dims) const;
    void real_output(const char *argument, const Tensor &tensor, int dims) const;

    // device + dtype + shape [n] + contiguous.
    void vector(const char *argument, const Tensor &tensor, DType expected, int64_t n) const;

    // Every value of `index` (i64 or i32, dense) is in [0, limit).
    void index_range(const char *argument, const Tensor &index, int64_t limit) const;

    // Final case of the dispatch by device: throws LLAISYS_ERROR_UNSUPPORTED.
    [[noreturn]] void no_kernel() const;
};

} // namespace llaisys::ops
