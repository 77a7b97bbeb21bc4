// cache[slots[i]] = values[i], and the reverse. One block for the keys and one for the values of a
// token; memory-bound. Storing in 8-bit caches: one warp per head, which finds the scale and then
// quantises.
#include "ops/kv_store/op.hpp"

#include "ops/cuda/kv_bytes.cuh"

namespace llaisys::ops {

namespace {

constexpr int kThreads = 256;

// Cache: Reals or KvBytes.
template <typename Cache> struct Rows {
    Cache cache;
    cuda::Reals values;
    int64_t stride_token, stride_head;

    Rows(const Cache &to, const Tensor &from)
        : cache(to), values(cuda::reals(from)), stride_token(from.stride(0)),
          stride_head(from.stride(1)) {}
};

__global__ void kv_store_kernel(Rows<cuda::Reals> keys, Rows<cuda::Reals> values,
                                const int32_t *slots, int64_t n_slots, int64_t heads, int64_t d) {
    cuda::grid_dependency_wait();
    const Rows<cuda::Reals> &rows = blockIdx.y == 0 ? keys : values;
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

template <typename Format>
__global__ void kv_store_bytes_kernel(Rows<cuda::KvBytes> keys, Rows<cuda::KvBytes> values,
                                      const int32_t *slots) {
    cuda::grid_dependency_wait();
    const Rows<cuda::KvBytes> &rows = blockIdx.y == 0 ? keys : values;
    const int64_t i = blockIdx.x;
    const int64_t slot = slots[i];
    if (slot < 0 || slot >= rows.cache.n_slots) {
        return;
    }
    const int lane = threadIdx.x % cuda::kWarpSize;
    const int64_t d = rows.cache.d;
    for (int64_t head = threadIdx.x / cuda::kWarpSize; head < rows.cache.n_heads;
         head += kThreads / cuda::kWarpSize) {
        const int64_t from = i * rows.stride_token + head * rows.stride_head;
        uint32_t largest = 0;
        for (int64_t c = lane; c < d; c += cuda::kWarpSize) {
            largest = max(largest, cuda::magnitude_bits(rows.values.load(from + c)));
        }
        const cuda::RowScale scale =
            cuda::row_scale<Format>(__reduce_max_sync(cuda::kFullMask, largest));
        uint8_t *to = rows.cache.values + rows.cache.row_at(slot, head);
        for (int64_t c = lane; c < d; c += cuda::kWarpSize) {
            to[c] = cuda::quantise<Format>(rows.values.load(from + c), scale.factor);
        }
        if (lane == 0) {
            rows.cache.set_scale(slot, head, scale.scale);
        }
    }
}

// Rows that are quantised already.
__global__ void kv_store_raw_kernel(cuda::KvByteRows keys, cuda::KvByteRows values,
                                    const int32_t *slots) {
    cuda::grid_dependency_wait();
    const cuda::KvByteRows &rows = blockIdx.y == 0 ? keys : values;
    const int64_t slot = slots[blockIdx.x];
    if (slot >= 0 && slot < rows.to.n_slots) {
        cuda::copy_slot(rows, slot, blockIdx.x);
    }
}

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

void kv_store_cuda(const device::Stream &stream, const KvLayer &kv, const Tensor &k,
                   const Tensor *v, const Tensor &slots) {
    if (k.elements() == 0) {
        return;
    }
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const dim3 grid(unsigned(k.size(0)), v != nullptr ? 2 : 1);
    const Tensor &values = v != nullptr ? *v : k;
    if (!is_eight_bits(kv.k.dtype())) {
        cuda::launch(cuda_stream, kv_store_kernel, grid, kThreads, 0, true,
                     Rows(cuda::reals(kv.k), k), Rows(cuda::reals(kv.values()), values),
                     slots.as<int32_t>(), kv.n_slots, kv.n_heads, kv.head_dim);
    } else if (is_eight_bits(k.dtype())) {
        cuda::launch(cuda_stream, kv_store_raw_kernel, grid, kThreads, 0, true,
                     cuda::KvByteRows{cuda::kv_bytes(kv.k), cuda::kv_bytes(k)},
                     cuda::KvByteRows{cuda::kv_bytes(kv.v), cuda::kv_bytes(values)},
                     slots.as<int32_t>());
    } else {
        const auto kernel = kv.k.dtype() == LLAISYS_DTYPE_I8 ? kv_store_bytes_kernel<cuda::Int8>
                                                             : kv_store_bytes_kernel<cuda::E4m3>;
        cuda::launch(cuda_stream, kernel, grid, kThreads, 0, true, Rows(cuda::kv_bytes(kv.k), k),
                     Rows(cuda::kv_bytes(kv.v), values), slots.as<int32_t>());
    }
}

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
