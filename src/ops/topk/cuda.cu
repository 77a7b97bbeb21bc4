// The k largest of each row, largest first. One block a row; each of the k rounds finds the best
// value after the one before in the order (falling value, rising index). k passes over a row that
// stays in the second-level cache: meant for the small k of a sampler's tests and logprobs.
#include "ops/topk/cuda.hpp"

#include "ops/cuda/common.cuh"

#include <cmath>

namespace llaisys::ops {

namespace {

constexpr int kThreads = 512;

struct Entry {
    float value; // never NaN
    int32_t index;
};

__device__ __forceinline__ bool before(const Entry &a, const Entry &b) {
    return a.value != b.value ? a.value > b.value : a.index < b.index;
}

__device__ Entry warp_first(Entry best) {
    for (int step = 16; step > 0; step >>= 1) {
        Entry other;
        other.value = __shfl_xor_sync(cuda::kAll, best.value, step);
        other.index = __shfl_xor_sync(cuda::kAll, best.index, step);
        if (before(other, best)) {
            best = other;
        }
    }
    return best;
}

__global__ void topk_kernel(int32_t *index, float *value, const float *values, int64_t n,
                            int64_t k) {
    __shared__ Entry found[kThreads / cuda::kWarp];
    __shared__ Entry last;
    cuda::wait_for_input();
    const float *row = values + int64_t(blockIdx.x) * n;
    const Entry none{-INFINITY, INT32_MAX};
    for (int64_t round = 0; round < k; ++round) {
        Entry best = none;
        for (int64_t i = threadIdx.x; i < n; i += kThreads) {
            const float x = row[i];
            const Entry entry{x == x ? x : -INFINITY, int32_t(i)};
            if ((round == 0 || before(last, entry)) && before(entry, best)) {
                best = entry;
            }
        }
        best = warp_first(best);
        if (threadIdx.x % cuda::kWarp == 0) {
            found[threadIdx.x / cuda::kWarp] = best;
        }
        __syncthreads();
        if (threadIdx.x < cuda::kWarp) {
            best = warp_first(threadIdx.x < kThreads / cuda::kWarp ? found[threadIdx.x] : none);
            if (threadIdx.x == 0) {
                last = best;
                index[int64_t(blockIdx.x) * k + round] = best.index;
                value[int64_t(blockIdx.x) * k + round] = best.value;
            }
        }
        __syncthreads();
    }
}

} // namespace

void topk_cuda(const device::Stream &stream, const Tensor &index, const Tensor &value,
               const Tensor &values) {
    if (values.size(0) > 0) {
        cuda::launch(device::cuda_stream_of(stream), topk_kernel, unsigned(values.size(0)),
                     kThreads, 0, true, index.as<int32_t>(), value.as<float>(), values.as<float>(),
                     values.size(1), value.size(1));
    }
}

} // namespace llaisys::ops
