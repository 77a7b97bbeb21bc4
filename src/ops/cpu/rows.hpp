// Rows of real tensors for f32 kernels: conversion in chunks that stay in L1, and the split of rows
// over threads. Only Scratch allocates.
#pragma once

#include "device/cpu/cpu_runtime.hpp"
#include "ops/cpu/kernels.hpp"
#include "tensor/tensor.hpp"

#include <algorithm>
#include <cstdlib>

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

// Values of one dtype in memory.
struct Values {
    std::byte *data;
    DType dtype;

    float *floats() const { return reinterpret_cast<float *>(data); }
    Values from(int64_t i) const { return {data + i * bytes_of_one(dtype), dtype}; }
};

inline Values values_of(float *p) { return {reinterpret_cast<std::byte *>(p), LLAISYS_DTYPE_F32}; }
// A dense tensor from element `first` on.
inline Values values_of(const Tensor &tensor, int64_t first = 0) {
    return Values{tensor.data(), tensor.dtype()}.from(first);
}
// Row i (of the first dimension), or head j of row i.
inline Values row_of(const Tensor &tensor, int64_t i) {
    return values_of(tensor, i * tensor.stride(0));
}
inline Values row_of(const Tensor &tensor, int64_t i, int64_t j) {
    return values_of(tensor, i * tensor.stride(0) + j * tensor.stride(1));
}

// n values as f32: in place when they are f32, else widened into buffer [n].
inline const float *read(const Kernels &kernels, Values in, float *buffer, int64_t n) {
    switch (in.dtype) {
    case LLAISYS_DTYPE_F16:
        kernels.widen_f16(buffer, reinterpret_cast<const f16_t *>(in.data), n);
        return buffer;
    case LLAISYS_DTYPE_BF16:
        kernels.widen_bf16(buffer, reinterpret_cast<const bf16_t *>(in.data), n);
        return buffer;
    case LLAISYS_DTYPE_F32:
        return in.floats();
    default:
        no_rows(in.dtype);
    }
}

// Where a kernel writes values of `out`: in place if they are f32, else to the buffer, which
// `finish` then narrows.
inline float *target(Values out, float *buffer) {
    return out.dtype == LLAISYS_DTYPE_F32 ? out.floats() : buffer;
}
inline void finish(const Kernels &kernels, Values out, const float *values, int64_t n) {
    switch (out.dtype) {
    case LLAISYS_DTYPE_F16:
        return kernels.narrow_f16(reinterpret_cast<f16_t *>(out.data), values, n);
    case LLAISYS_DTYPE_BF16:
        return kernels.narrow_bf16(reinterpret_cast<bf16_t *>(out.data), values, n);
    case LLAISYS_DTYPE_F32:
        if (out.floats() != values) {
            std::memcpy(out.data, values, size_t(n) * sizeof(float));
        }
        return;
    default:
        no_rows(out.dtype);
    }
}

// out = in over n values of any real dtypes; a plain copy when they are the same.
inline void convert(const Kernels &kernels, Values out, Values in, int64_t n) {
    if (out.dtype == in.dtype) {
        std::memcpy(out.data, in.data, size_t(n * bytes_of_one(out.dtype)));
        return;
    }
    float buffer[kPiece];
    for (int64_t i = 0; i < n; i += kPiece) {
        const int64_t piece = std::min(kPiece, n - i);
        const Values to = out.from(i);
        finish(kernels, to, read(kernels, in.from(i), target(to, buffer), piece), piece);
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

// Splits rows of `columns` values, `work` element steps each, into pieces of up to kPiece: calls
// body(i, c, n) for the values [c, c + n) of row i. Several threads may share a row.
template <typename Body>
void for_pieces(const device::Stream &stream, int64_t rows, int64_t columns, int64_t work,
                const Body &body) {
    const int64_t pieces = (columns + kPiece - 1) / kPiece;
    for_rows(stream, rows * pieces, work * kPiece, [&](int64_t first, int64_t last) {
        for (int64_t item = first; item < last; ++item) {
            const int64_t c = item % pieces * kPiece;
            body(item / pieces, c, std::min(kPiece, columns - c));
        }
    });
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
