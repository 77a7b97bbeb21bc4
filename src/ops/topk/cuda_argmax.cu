// Argmax of each row; the first index wins ties. With few rows, several blocks share a row and
// the last one to finish reduces their results; 16-byte loads of f32 rows. Memory-bound.
#include "ops/topk/op.hpp"

#include "ops/cuda/common.cuh"

#include <algorithm>

namespace llaisys::ops {

namespace {

constexpr int kThreads = 1024;
constexpr int kMaxParts = 32; // blocks per row

struct Best {
    float value;
    int64_t index; // -1: none yet
};

// NaN never wins; the lower index wins a tie.
__device__ __forceinline__ void take(Best &best, float value, int64_t index) {
    if (value == value &&
        (best.index < 0 || value > best.value || (value == best.value && index < best.index))) {
        best = {value, index};
    }
}

__device__ __forceinline__ void take(Best &best, const Best &other) {
    if (other.index >= 0) {
        take(best, other.value, other.index);
    }
}

__device__ Best warp_best(Best best) {
    for (int step = 16; step > 0; step >>= 1) {
        Best other;
        other.value = __shfl_xor_sync(cuda::kFullMask, best.value, step);
        other.index = __shfl_xor_sync(cuda::kFullMask, best.index, step);
        take(best, other);
    }
    return best;
}

// Argmax of the float4 values first, first + step, ... below n of a row. Each float4 counts by
// its maximum; only the best one is read again for the index. kAhead loads are in flight.
__device__ __forceinline__ Best best_of_quads(const float4 *x, int first, int step, int n) {
    constexpr int kAhead = 4;
    float value = -INFINITY;
    int at = -1;
    for (int i = first; i < n; i += kAhead * step) {
        float4 four[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            if (i + j * step < n) {
                four[j] = __ldcs(x + i + j * step);
            }
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const float most = fmaxf(fmaxf(four[j].x, four[j].y), fmaxf(four[j].z, four[j].w));
            // fmaxf returns NaN only if both are NaN.
            if (i + j * step < n && (most > value || (at < 0 && most == most))) {
                value = most;
                at = i + j * step;
            }
        }
    }
    Best best{0, -1};
    if (at >= 0) {
        const float4 four = x[at];
        take(best, four.x, 4 * int64_t(at));
        take(best, four.y, 4 * int64_t(at) + 1);
        take(best, four.z, 4 * int64_t(at) + 2);
        take(best, four.w, 4 * int64_t(at) + 3);
    }
    return best;
}

// partial: [rows, parts]; counters: [rows], zero between calls.
__global__ void __launch_bounds__(kThreads, 2)
    argmax_kernel(int64_t *max_index, cuda::Reals max_value, cuda::Reals values, int64_t n,
                  Best *partial, int32_t *counters, ArgmaxOnHost host) {
    __shared__ Best found[kThreads / cuda::kWarpSize];
    __shared__ bool is_last;
    cuda::grid_dependency_wait();
    cuda::launch_dependents();
    const int64_t row = blockIdx.y;
    const int parts = int(gridDim.x);
    const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t step = int64_t(parts) * kThreads;
    Best best{0, -1};
    if (values.dtype == LLAISYS_DTYPE_F32 && n % 4 == 0 && n < INT32_MAX / 2) {
        const float4 *x =
            reinterpret_cast<const float4 *>(static_cast<const float *>(values.data) + row * n);
        best = best_of_quads(x, int(first), int(step), int(n / 4));
    } else {
        for (int64_t i = first; i < n; i += step) {
            take(best, values.load(row * n + i), i);
        }
    }
    best = warp_best(best);
    if (threadIdx.x % cuda::kWarpSize == 0) {
        found[threadIdx.x / cuda::kWarpSize] = best;
    }
    __syncthreads();
    if (threadIdx.x >= cuda::kWarpSize) {
        return;
    }
    best = warp_best(found[threadIdx.x]);
    if (parts > 1) {
        if (threadIdx.x == 0) {
            partial[row * parts + blockIdx.x] = best;
            __threadfence();
            is_last = atomicAdd(counters + row, 1) == parts - 1;
            __threadfence();
        }
        __syncwarp();
        if (!is_last) {
            return;
        }
        const Best none{0, -1};
        const volatile Best *all = partial + row * parts;
        best = none;
        if (int(threadIdx.x) < parts) {
            best.value = all[threadIdx.x].value;
            best.index = all[threadIdx.x].index;
        }
        best = warp_best(best);
    }
    if (threadIdx.x == 0) {
        const bool is_found = best.index >= 0;
        const int64_t index = is_found ? best.index : 0; // a row of NaN gives 0
        max_index[row] = index;
        const float value = is_found ? best.value : values.load(row * n);
        max_value.store(row, value);
        if (host.index != nullptr) {
            host.index[row] = index;
            host.value[row] = value;
        }
        counters[row] = 0;
    }
}

static_assert(kThreads == cuda::kWarpSize * cuda::kWarpSize);

} // namespace

void argmax_cuda(const device::Stream &stream, const Tensor &max_index, const Tensor &max_value,
                 const Tensor &values, const ArgmaxOnHost &host) {
    const int64_t rows = values.size(0);
    if (rows == 0) {
        return;
    }
    device::CudaStream &on = device::cuda_stream_of(stream);
    const int64_t useful = (values.size(1) + 4 * kThreads - 1) / (4 * kThreads);
    const int64_t parts =
        std::clamp<int64_t>(2 * on.n_sms / rows, 1, std::min<int64_t>(useful, kMaxParts));
    auto *partial = static_cast<Best *>(on.scratch.at_least(size_t(rows * parts) * sizeof(Best)));
    auto *counters = static_cast<int32_t *>(on.counters.at_least(size_t(rows) * sizeof(int32_t)));
    cuda::launch(on, argmax_kernel, dim3(unsigned(parts), unsigned(rows)), kThreads, 0, true,
                 max_index.as<int64_t>(), cuda::reals(max_value), cuda::reals(values),
                 values.size(1), partial, counters, host);
}

} // namespace llaisys::ops
