// rows[i] = cache[slots[i]]. One block for the keys and one for the values of a slot;
// memory-bound.
#include "ops/kv_load/op.hpp"

#include "ops/cuda/kv_bytes.cuh"

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

// 8-bit caches, dequantised.
__global__ void kv_load_bytes_kernel(cuda::Reals k, cuda::Reals v, cuda::KvBytes k_cache,
                                     cuda::KvBytes v_cache, const int32_t *slots) {
    cuda::grid_dependency_wait();
    const cuda::Reals &to = blockIdx.y == 0 ? k : v;
    const cuda::KvBytes &from = blockIdx.y == 0 ? k_cache : v_cache;
    const int64_t slot = slots[blockIdx.x];
    const int64_t row = from.n_heads * from.d;
    for (int64_t c = threadIdx.x; c < row; c += kThreads) {
        to.store(blockIdx.x * row + c, from.value(slot * row + c) * from.scale(slot, c / from.d));
    }
}

// 8-bit caches, as they are.
__global__ void kv_load_raw_kernel(cuda::KvByteRows keys, cuda::KvByteRows values,
                                   const int32_t *slots) {
    cuda::grid_dependency_wait();
    cuda::copy_slot(blockIdx.y == 0 ? keys : values, blockIdx.x, slots[blockIdx.x]);
}

} // namespace

void kv_load_cuda(const device::Stream &stream, const Tensor &k, const Tensor *v, const KvLayer &kv,
                  const Tensor &slots) {
    if (k.elements() == 0) {
        return;
    }
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const dim3 grid(unsigned(k.size(0)), v != nullptr ? 2 : 1);
    const Tensor &values = v != nullptr ? *v : k;
    if (!is_eight_bits(kv.k.dtype())) {
        cuda::launch(cuda_stream, kv_load_kernel, grid, kThreads, 0, true, cuda::reals(k),
                     cuda::reals(v), cuda::reals(kv.k), cuda::reals(kv.values()),
                     slots.as<int32_t>(), kv.n_heads * kv.head_dim);
    } else if (is_eight_bits(k.dtype())) {
        cuda::launch(cuda_stream, kv_load_raw_kernel, grid, kThreads, 0, true,
                     cuda::KvByteRows{cuda::kv_bytes(k), cuda::kv_bytes(kv.k)},
                     cuda::KvByteRows{cuda::kv_bytes(values), cuda::kv_bytes(kv.v)},
                     slots.as<int32_t>());
    } else {
        cuda::launch(cuda_stream, kv_load_bytes_kernel, grid, kThreads, 0, true, cuda::reals(k),
                     cuda::reals(values), cuda::kv_bytes(kv.k), cuda::kv_bytes(kv.v),
                     slots.as<int32_t>());
    }
}

} // namespace llaisys::ops
