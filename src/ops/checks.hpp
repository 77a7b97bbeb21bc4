// Argument checks of the operators, made before anything is written. Each throws
// LLAISYS_ERROR_INVALID with "operator: argument: got ..., expected ..."; texts are built on
// failure only.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

#include <initializer_list>
#include <type_traits>
#include <utility>

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

    // device + real + ndim + dense rows, and writable for an output; then the shape.
    void real_rows(const char *argument, const Tensor &tensor, int dims) const;
    void real_rows(const char *argument, const Tensor &tensor,
                   std::initializer_list<int64_t> expected) const;
    void real_output(const char *argument, const Tensor &tensor, int dims) const;
    void real_output(const char *argument, const Tensor &tensor,
                     std::initializer_list<int64_t> expected) const;

    // device + dtype + shape + contiguous; a vector has the shape [n], a matrix any two sizes.
    void dense(const char *argument, const Tensor &tensor, DType dtype_expected,
               std::initializer_list<int64_t> expected) const;
    void vector(const char *argument, const Tensor &tensor, DType dtype_expected, int64_t n) const {
        dense(argument, tensor, dtype_expected, {n});
    }
    // Likewise of a tensor that is not required: null or without storage.
    void optional_vector(const char *argument, const Tensor *tensor, DType dtype_expected,
                         int64_t n) const {
        if (tensor != nullptr && tensor->defined()) {
            vector(argument, *tensor, dtype_expected, n);
        }
    }
    void matrix(const char *argument, const Tensor &tensor, DType dtype_expected) const;

    // Every value of `index` (i64 or i32, dense) is in [0, limit).
    void index_range(const char *argument, const Tensor &index, int64_t limit) const;

    // Runs the kernel of the stream's device; null: it has none.
    template <typename Kernel, typename... Args>
    void dispatch(Kernel *cpu, std::common_type_t<Kernel *> cuda, Args &&...args) const {
        Kernel *const kernel = stream.type() == LLAISYS_DEVICE_CPU      ? cpu
                               : stream.type() == LLAISYS_DEVICE_NVIDIA ? cuda
                                                                        : nullptr;
        if (kernel == nullptr) {
            no_kernel();
        }
        kernel(stream, std::forward<Args>(args)...);
    }

    // Throws LLAISYS_ERROR_UNSUPPORTED.
    [[noreturn]] void no_kernel() const;
};

// The kernels of an operator for dispatch(): `op`_cpu, and `op`_cuda in a build with CUDA. op.hpp
// declares them with the type of the operator, cpu.cpp and cuda.cu define them. Their arguments have
// been checked.
#if defined(LLAISYS_HAVE_CUDA)
#define LLAISYS_KERNELS(op) op##_cpu, op##_cuda
#else
#define LLAISYS_KERNELS(op) op##_cpu, nullptr
#endif

} // namespace llaisys::ops
