// rows[i] = cache[slots[i]]. One block for the keys and one for the values of a slot;
// memory-bound.
#include "ops/kv_load/cuda.hpp"

#include "ops/cuda/common.cuh"

namespace llaisys::ops {

namespace {

constexpr int kThreads = 256;

__global__ void kv_load_kernel(cuda::Reals k, cuda::Reals v, cuda::Reals k_cache,
                               cuda::Reals v_cache, const int32_t *slots, int64_t row) {
    cuda::grid_dependency_wait();
    const cuda::Reals &to = blockIdx.y == 0 ? k : v;
    const cuda::Reals &from = blockIdx.y == 0 ? k_cache : v_cache;
    const int64_t slot = slots[blockIdx.x];
    for (int64_t c = threadIdx.x; c < row; c += kThreads) {
        to.store(blockIdx.x * row + c, from.load(slot * row + c));
    }
}

} // namespace

void kv_load_cuda(const device::Stream &stream, const Tensor &k, const Tensor *v, const KvLayer &kv,
                  const Tensor &slots) {
    if (k.elements() == 0) {
        return;
    }
    const dim3 grid(unsigned(k.size(0)), v != nullptr ? 2 : 1);
    cuda::launch(device::cuda_stream_of(stream), kv_load_kernel, grid, kThreads, 0, true,
                 cuda::reals(k), cuda::reals(v), cuda::reals(kv.k), cuda::reals(kv.v),
                 slots.as<int32_t>(), kv.n_heads * kv.head_dim);
}

} // namespace llaisys::ops
