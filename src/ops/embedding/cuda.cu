// Embedding lookup. One block per row; memory-bound.
#include "ops/embedding/op.hpp"

#include "ops/cuda/dispatch.cuh"

namespace llaisys::ops {

namespace {

using cuda::is_16_byte_aligned;

constexpr int kThreads = 256;

__global__ void embedding_kernel(cuda::Reals out, const int64_t *index, cuda::Reals table,
                                 int64_t rows, int64_t d) {
    cuda::grid_dependency_wait();
    cuda::launch_dependents();
    const int64_t i = blockIdx.x;
    const int64_t row = index[i];
    const bool is_inside = row >= 0 && row < rows;
    for (int64_t c = threadIdx.x; c < d; c += kThreads) {
        out.store(i * d + c, is_inside ? table.load(row * d + c) : 0.0f);
    }
}

// Fast path: 16-bit table with 16-byte aligned rows, f32 output. Eight values per thread.
template <typename T>
__global__ void embedding_wide_kernel(float *out, const int64_t *index, const T *table,
                                      int64_t rows, int64_t d) {
    cuda::grid_dependency_wait();
    cuda::launch_dependents();
    const int64_t i = blockIdx.x;
    const int64_t row = index[i];
    const bool is_inside = row >= 0 && row < rows;
    for (int64_t c = threadIdx.x * 8; c < d; c += kThreads * 8) {
        uint4 bits = make_uint4(0, 0, 0, 0);
        if (is_inside) {
            bits = *reinterpret_cast<const uint4 *>(table + row * d + c);
        }
        const T *values = reinterpret_cast<const T *>(&bits);
        auto *to = reinterpret_cast<float4 *>(out + i * d + c);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            to[j] =
                make_float4(cuda::to_float(values[4 * j]), cuda::to_float(values[4 * j + 1]),
                            cuda::to_float(values[4 * j + 2]), cuda::to_float(values[4 * j + 3]));
        }
    }
}

} // namespace

void embedding_cuda(const device::Stream &stream, const Tensor &out, const Tensor &index,
                    const Tensor &table) {
    const int64_t n = out.size(0);
    const bool is_wide = n > 0 && out.dtype() == LLAISYS_DTYPE_F32 &&
                         table.dtype() != LLAISYS_DTYPE_F32 && table.size(1) % 8 == 0 &&
                         is_16_byte_aligned(out) && is_16_byte_aligned(table);
    if (is_wide) {
        return cuda::dispatch_half(table.dtype(), [&](auto type) {
            using T = decltype(type);
            cuda::launch(device::cuda_stream_of(stream), embedding_wide_kernel<T>, unsigned(n),
                         kThreads, 0, true, out.as<float>(), index.as<int64_t>(),
                         reinterpret_cast<const T *>(table.data()), table.size(0), table.size(1));
        });
    }
    if (n > 0) {
        cuda::launch(device::cuda_stream_of(stream), embedding_kernel, unsigned(n), kThreads, 0,
                     true, cuda::reals(out), index.as<int64_t>(), cuda::reals(table), table.size(0),
                     table.size(1));
    }
}

} // namespace llaisys::ops
