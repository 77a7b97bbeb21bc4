// cache[slots[i]] = values[i]. One block for the keys and one for the values of a token;
// memory-bound.
#include "ops/kv_store/cuda.hpp"

#include "ops/cuda/common.cuh"

namespace llaisys::ops {

namespace {

constexpr int kThreads = 256;

struct Rows {
    cuda::Reals cache, values;
    int64_t stride_token, stride_head;
};

__global__ void kv_store_kernel(Rows keys, Rows values, const int32_t *slots, int64_t n_slots,
                                int64_t heads, int64_t d) {
    cuda::grid_dependency_wait();
    const Rows &rows = blockIdx.y == 0 ? keys : values;
    const int64_t i = blockIdx.x;
    const int64_t slot = slots[i];
    if (slot < 0 || slot >= n_slots) {
        return;
    }
    for (int64_t c = threadIdx.x; c < heads * d; c += kThreads) {
        rows.cache.store(slot * heads * d + c, rows.values.load(i * rows.stride_token +
                                                                c / d * rows.stride_head + c % d));
    }
}

Rows rows_of(const Tensor &cache, const Tensor &values) {
    return {cuda::reals(cache), cuda::reals(values), values.stride(0), values.stride(1)};
}

} // namespace

void kv_store_cuda(const device::Stream &stream, const KvLayer &kv, const Tensor &k,
                   const Tensor *v, const Tensor &slots) {
    if (k.elements() == 0) {
        return;
    }
    const dim3 grid(unsigned(k.size(0)), v != nullptr ? 2 : 1);
    cuda::launch(device::cuda_stream_of(stream), kv_store_kernel, grid, kThreads, 0, true,
                 rows_of(kv.k, k), rows_of(kv.v, v != nullptr ? *v : k), slots.as<int32_t>(),
                 kv.n_slots, kv.n_heads, kv.head_dim);
}

} // namespace llaisys::ops
