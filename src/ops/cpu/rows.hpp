// Rows of real tensors for f32 kernels: conversion in chunks that stay in L1, and the split of rows
// over threads. Only Scratch allocates.
#pragma once

#include "device/cpu/cpu_runtime.hpp"
#include "ops/cpu/kernels.hpp"
#include "tensor/tensor.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace llaisys::ops::cpu {

constexpr int64_t kPiece = 512; // values converted at a time: 2 KiB of f32

inline int64_t bytes_of_one(DType dtype) {
    switch (dtype) {
    case LLAISYS_DTYPE_F32:
        return 4;
    case LLAISYS_DTYPE_F16:
    case LLAISYS_DTYPE_BF16:
        return 2;
    case LLAISYS_DTYPE_I8: // rows of an 8-bit KV cache, which are only copied
        return 1;
    default:
        no_rows(dtype);
    }
}

inline const std::byte *at(const std::byte *p, DType dtype, int64_t offset) {
    return p + offset * bytes_of_one(dtype);
}
inline std::byte *at(std::byte *p, DType dtype, int64_t offset) {
    return p + offset * bytes_of_one(dtype);
}

// The start of row i (of the first dimension), or of head j of row i.
inline std::byte *row_of(const Tensor &tensor, int64_t i) {
    return at(tensor.data(), tensor.dtype(), i * tensor.stride(0));
}
inline std::byte *row_of(const Tensor &tensor, int64_t i, int64_t j) {
    return at(tensor.data(), tensor.dtype(), i * tensor.stride(0) + j * tensor.stride(1));
}

// n values as f32: in place when they are f32, else widened into buffer [n].
inline const float *read(const Kernels &kernels, const std::byte *p, DType dtype, float *buffer,
                         int64_t n) {
    switch (dtype) {
    case LLAISYS_DTYPE_F16:
        kernels.widen_f16(buffer, reinterpret_cast<const f16_t *>(p), n);
        return buffer;
    case LLAISYS_DTYPE_BF16:
        kernels.widen_bf16(buffer, reinterpret_cast<const bf16_t *>(p), n);
        return buffer;
    case LLAISYS_DTYPE_F32:
        return reinterpret_cast<const float *>(p);
    default:
        no_rows(dtype);
    }
}

// Where a kernel writes n values of p: p itself if it is f32, else the buffer, which `finish` then
// narrows into p.
inline float *target(std::byte *p, DType dtype, float *buffer) {
    return dtype == LLAISYS_DTYPE_F32 ? reinterpret_cast<float *>(p) : buffer;
}
inline void finish(const Kernels &kernels, std::byte *p, DType dtype, const float *values,
                   int64_t n) {
    switch (dtype) {
    case LLAISYS_DTYPE_F16:
        return kernels.narrow_f16(reinterpret_cast<f16_t *>(p), values, n);
    case LLAISYS_DTYPE_BF16:
        return kernels.narrow_bf16(reinterpret_cast<bf16_t *>(p), values, n);
    case LLAISYS_DTYPE_F32:
        if (reinterpret_cast<float *>(p) != values) {
            std::memcpy(p, values, size_t(n) * sizeof(float));
        }
        return;
    default:
        no_rows(dtype);
    }
}

// out = in over n values of any real dtypes; a plain copy when they are the same.
inline void convert(const Kernels &kernels, std::byte *out, DType out_dtype, const std::byte *in,
                    DType in_dtype, int64_t n) {
    if (out_dtype == in_dtype) {
        std::memcpy(out, in, size_t(n * bytes_of_one(out_dtype)));
        return;
    }
    float buffer[kPiece];
    for (int64_t i = 0; i < n; i += kPiece) {
        const int64_t piece = std::min(kPiece, n - i);
        const float *values = read(kernels, at(in, in_dtype, i), in_dtype,
                                   target(at(out, out_dtype, i), out_dtype, buffer), piece);
        finish(kernels, at(out, out_dtype, i), out_dtype, values, piece);
    }
}

// Splits n rows of `work` element steps each: calls body(first, last) for ranges of them, on
// several threads only if there is enough work for a parallel region.
template <typename Body>
void for_rows(const device::Stream &stream, int64_t n, int64_t work, const Body &body) {
    constexpr int64_t kWorthwhile = 16384; // element steps of a chunk, a few microseconds
    device::ThreadPool &pool = device::pool_of(stream);
    const int64_t affordable = n * std::max<int64_t>(work, 1) / kWorthwhile;
    const int64_t chunks = std::min({n, affordable, int64_t(pool.size()) * 4});
    if (chunks <= 1 || pool.size() == 1) {
        if (n > 0) {
            body(int64_t(0), n);
        }
        return;
    }
    pool.run(chunks,
             [&](int64_t chunk, int) { body(n * chunk / chunks, n * (chunk + 1) / chunks); });
}

// Memory that the calling thread keeps between calls: grows, never shrinks. Workers use slices of
// their caller's scratch, so a region allocates nothing.
class Scratch {
public:
    // At least n floats, aligned to 64 bytes; the content is undefined. Valid until the next call.
    // Throws LLAISYS_ERROR_MEMORY.
    float *floats(int64_t n) {
        if (n > capacity_) {
            std::free(memory_);
            capacity_ = 0;
            memory_ = nullptr;
            const int64_t wanted = round_up(n, 1024);
            memory_ = static_cast<float *>(std::aligned_alloc(64, size_t(wanted) * sizeof(float)));
            if (memory_ == nullptr) {
                fail(LLAISYS_ERROR_MEMORY, wanted * 4, " bytes of scratch could not be allocated");
            }
            capacity_ = wanted;
        }
        return memory_;
    }
    ~Scratch() { std::free(memory_); }

    Scratch() = default;
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;

private:
    float *memory_ = nullptr;
    int64_t capacity_ = 0;
};

} // namespace llaisys::ops::cpu
