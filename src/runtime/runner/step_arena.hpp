// The numbers of one micro-batch: written once into host memory and brought to the device as one copy.
// On the CPU the tensors are that host memory and nothing is copied.
#pragma once

#include "ops/step_copies/op.hpp"
#include "tensor/tensor.hpp"

#include <cstddef>

namespace llaisys::runtime {

class StepArena {
public:
    explicit StepArena(const device::Stream &stream);
    ~StepArena();
    StepArena(const StepArena &) = delete;
    StepArena &operator=(const StepArena &) = delete;

    // Forgets what was taken, with room for at least `bytes` (bytes_for of all that will be taken,
    // added up). Waits until the copy before has left the host memory.
    void begin(int64_t bytes);

    // Dense values in device memory, and where to write them on the host until upload(). The same
    // places for the same shapes while generation() stays the same.
    template <typename T> T *take(const Shape &shape, Tensor *tensor) {
        return static_cast<T *>(take_bytes(shape, dtype_of_integer(T{}), tensor));
    }
    static int64_t bytes_for(int64_t n, int64_t element_bytes) {
        return (n * element_bytes + kAlignment - 1) / kAlignment * kAlignment;
    }

    // In order with the stream. sampled: tokens and sources were taken of this arena.
    void upload(const ops::SampledTokens *sampled = nullptr);

    int64_t generation() const { return generation_; } // changes when the memory moves

private:
    static constexpr int64_t kAlignment = 64;
    static DType dtype_of_integer(int32_t) { return LLAISYS_DTYPE_I32; }
    static DType dtype_of_integer(int64_t) { return LLAISYS_DTYPE_I64; }
    static DType dtype_of_integer(float) { return LLAISYS_DTYPE_F32; }
    void *take_bytes(const Shape &shape, DType dtype, Tensor *tensor);

    const device::Stream &stream_;
    std::shared_ptr<Storage> device_; // what the tensors look at
    std::byte *host_ = nullptr;       // the same memory on the CPU
    int64_t capacity_ = 0;
    int64_t used_ = 0;
    int64_t generation_ = 0;
    void *uploaded_; // event
    bool is_uploading_ = false;
};

} // namespace llaisys::runtime
