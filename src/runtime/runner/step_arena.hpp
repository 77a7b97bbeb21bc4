// Input arrays of one micro-batch: written to host memory and uploaded with one copy. On the CPU
// the tensors use the host memory directly.
#pragma once

#include "ops/step_copies/op.hpp"
#include "runtime/workspace/workspace.hpp"

#include <algorithm>
#include <cstddef>

namespace llaisys::runtime {

class StepArena {
public:
    explicit StepArena(const device::Stream &stream);
    ~StepArena();
    StepArena(const StepArena &) = delete;
    StepArena &operator=(const StepArena &) = delete;

    // Releases all allocations and reserves `bytes` (the sum of bytes_for of the next ones). Waits
    // until the previous upload has read the host memory.
    void begin(int64_t bytes);

    // Allocates a contiguous device tensor and returns the host memory to fill before upload().
    // Equal shapes get equal addresses while generation() stays the same.
    template <typename T> T *allocate(const Shape &shape, Tensor *tensor) {
        return static_cast<T *>(allocate_bytes(shape, dtype_of_integer(T{}), tensor));
    }
    // The same for a vector of n_padded values: copies n of them, the others are `filler`.
    template <typename T> Tensor put(const T *values, int64_t n, int64_t n_padded, T filler = 0) {
        Tensor tensor;
        T *to = allocate<T>({n_padded}, &tensor);
        std::fill(std::copy_n(values, n, to), to + n_padded, filler);
        return tensor;
    }
    static int64_t bytes_for(int64_t n, int64_t element_bytes) {
        return Workspace::aligned(n * element_bytes);
    }

    // Uploads in stream order. sampled: its tokens and sources are allocated in this arena.
    void upload(const ops::SampledTokens *sampled = nullptr);

    int64_t generation() const { return device_.allocations(); } // changes when the memory moves

private:
    static DType dtype_of_integer(int32_t) { return LLAISYS_DTYPE_I32; }
    static DType dtype_of_integer(int64_t) { return LLAISYS_DTYPE_I64; }
    static DType dtype_of_integer(float) { return LLAISYS_DTYPE_F32; }
    void *allocate_bytes(const Shape &shape, DType dtype, Tensor *tensor);

    const device::Stream &stream_;
    Workspace device_;
    std::byte *host_ = nullptr; // on the CPU the same memory
    int64_t host_bytes_ = 0;
    void *uploaded_; // event
    bool is_uploading_ = false;
};

} // namespace llaisys::runtime
