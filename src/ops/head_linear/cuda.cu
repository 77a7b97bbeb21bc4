// A matrix product per head.
//
//   16-bit values of one dtype, sizes   head_linear_mma_kernel: one block per head, 16 or 32 tokens
//   multiples of 16, 16-byte alignment  and 64 outputs; a warp has 16 outputs and reads their
//                                       weights from global memory. Few tokens: memory-bound.
//   everything else                     head_linear_reference_kernel: one warp per output
//
// Both sum along K in one fixed order: batch-invariant.
#include "ops/head_linear/op.hpp"

#include "ops/cuda/common.cuh"
#include "ops/cuda/dispatch.cuh"

#include <mma.h>

namespace llaisys::ops {

namespace {

using cuda::has_aligned_rows;

constexpr int kTile = 16; // of an mma
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * cuda::kWarpSize;
constexpr int kPadding = 8;             // values of a row in shared memory, against bank conflicts
constexpr size_t kMaxShared = 40 << 10; // of the tokens; no attribute is needed below 48 KiB

struct Strides {
    int64_t token, head;
};

// T: __half or __nv_bfloat16. Tiles: of 16 tokens.
template <typename T, int Tiles>
__global__ void __launch_bounds__(kThreads)
    head_linear_mma_kernel(T *out, Strides out_strides, const T *in, Strides in_strides,
                           const T *weights, int n, int n_out, int k) {
    namespace wmma = nvcuda::wmma;
    extern __shared__ uint4 dynamic_shared[];
    __shared__ float results[kWarps][kTile * kTile];
    T *rows = reinterpret_cast<T *>(dynamic_shared); // [Tiles * kTile, k + kPadding]
    const int ld = k + kPadding;
    const int warp = threadIdx.x / cuda::kWarpSize, lane = threadIdx.x % cuda::kWarpSize;
    const int head = int(blockIdx.y);
    const int first_token = int(blockIdx.z) * Tiles * kTile;
    const int first_out = (int(blockIdx.x) * kWarps + warp) * kTile;
    cuda::launch_dependents();
    cuda::grid_dependency_wait();
    const int units = k / 8; // of 16 bytes
    for (int i = threadIdx.x; i < Tiles * kTile * units; i += kThreads) {
        const int row = i / units, unit = i % units;
        uint4 values{};
        if (first_token + row < n) {
            const T *from =
                in + (first_token + row) * in_strides.token + head * in_strides.head + unit * 8;
            values = *reinterpret_cast<const uint4 *>(from);
        }
        *reinterpret_cast<uint4 *>(rows + row * ld + unit * 8) = values;
    }
    __syncthreads();
    if (first_out >= n_out) {
        return;
    }
    wmma::fragment<wmma::accumulator, kTile, kTile, kTile, float> sums[Tiles];
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
        wmma::fill_fragment(sums[t], 0.0f);
    }
    const T *weight = weights + (int64_t(head) * n_out + first_out) * k;
#pragma unroll 4
    for (int step = 0; step < k; step += kTile) {
        wmma::fragment<wmma::matrix_b, kTile, kTile, kTile, T, wmma::col_major> b;
        wmma::load_matrix_sync(b, weight + step, unsigned(k));
#pragma unroll
        for (int t = 0; t < Tiles; ++t) {
            wmma::fragment<wmma::matrix_a, kTile, kTile, kTile, T, wmma::row_major> a;
            wmma::load_matrix_sync(a, rows + t * kTile * ld + step, unsigned(ld));
            wmma::mma_sync(sums[t], a, b, sums[t]);
        }
    }
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
        __syncwarp();
        wmma::store_matrix_sync(results[warp], sums[t], kTile, wmma::mem_row_major);
        __syncwarp();
        for (int i = lane; i < kTile * kTile; i += cuda::kWarpSize) {
            const int token = first_token + t * kTile + i / kTile;
            if (token < n) {
                out[token * out_strides.token + head * out_strides.head + first_out + i % kTile] =
                    cuda::from_float<T>(results[warp][i]);
            }
        }
    }
}

__global__ void __launch_bounds__(kThreads)
    head_linear_reference_kernel(cuda::Reals out, Strides out_strides, cuda::Reals in,
                                 Strides in_strides, cuda::Reals weights, int64_t n_out,
                                 int64_t k) {
    cuda::launch_dependents();
    cuda::grid_dependency_wait();
    const int64_t token = blockIdx.x, head = blockIdx.y;
    const int warp = threadIdx.x / cuda::kWarpSize, lane = threadIdx.x % cuda::kWarpSize;
    const int64_t from = token * in_strides.token + head * in_strides.head;
    for (int64_t o = warp; o < n_out; o += kWarps) {
        float sum = 0;
        for (int64_t i = lane; i < k; i += cuda::kWarpSize) {
            sum += in.load(from + i) * weights.load((head * n_out + o) * k + i);
        }
        sum = cuda::warp_sum(sum);
        if (lane == 0) {
            out.store(token * out_strides.token + head * out_strides.head + o, sum);
        }
    }
}

size_t shared_bytes(int tiles, int64_t k) {
    return size_t(tiles * kTile * (k + kPadding)) * sizeof(uint16_t);
}

template <typename T, int Tiles>
void run_mma(const device::CudaStream &stream, const Tensor &out, const Tensor &in,
             const ExpertWeights &weights) {
    const dim3 grid(cuda::ceil_div(weights.out_features, kWarps * kTile), unsigned(weights.count),
                    cuda::ceil_div(in.size(0), Tiles * kTile));
    cuda::launch(stream, head_linear_mma_kernel<T, Tiles>, grid, kThreads,
                 shared_bytes(Tiles, weights.in_features), true, reinterpret_cast<T *>(out.data()),
                 Strides{out.stride(0), out.stride(1)}, reinterpret_cast<const T *>(in.data()),
                 Strides{in.stride(0), in.stride(1)},
                 reinterpret_cast<const T *>(weights.all.bytes.data()), int(in.size(0)),
                 int(weights.out_features), int(weights.in_features));
}

} // namespace

void head_linear_cuda(const device::Stream &stream, const Tensor &out, const Tensor &in,
                      const ExpertWeights &weights) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const Tensor &matrices = weights.all.bytes;
    const int64_t k = weights.in_features;
    const DType dtype = matrices.dtype();
    const bool is_fast =
        dtype != LLAISYS_DTYPE_F32 && in.dtype() == dtype && out.dtype() == dtype &&
        k % kTile == 0 && weights.out_features % kTile == 0 && has_aligned_rows(in) &&
        reinterpret_cast<uintptr_t>(matrices.data()) % 32 == 0 && shared_bytes(1, k) <= kMaxShared;
    if (!is_fast) {
        const dim3 grid(unsigned(in.size(0)), unsigned(weights.count));
        return cuda::launch(cuda_stream, head_linear_reference_kernel, grid, kThreads, 0, true,
                            cuda::reals(out), Strides{out.stride(0), out.stride(1)},
                            cuda::reals(in), Strides{in.stride(0), in.stride(1)},
                            cuda::reals(matrices), weights.out_features, k);
    }
    cuda::dispatch_half(dtype, [&](auto type) {
        using T = decltype(type);
        const bool are_many = in.size(0) > kTile && shared_bytes(2, k) <= kMaxShared;
        are_many ? run_mma<T, 2>(cuda_stream, out, in, weights)
                 : run_mma<T, 1>(cuda_stream, out, in, weights);
    });
}

} // namespace llaisys::ops
