// cache[slots[i]] = values[i], and the reverse. One block for the keys and one for the values of a
// token; memory-bound. Storing in 8-bit caches: one warp per head, which finds the scale and then
// quantises.
//
// Copies KV blocks of a layer between device and pinned host memory. The kernel accesses host
// memory directly: one launch per layer instead of one copy per block. One thread block for the
// keys and one for the values of a KV block; bound by the host link. If the keys of a block are a
// multiple of 16 bytes, every offset is 16-byte aligned. An 8-bit block is its bytes, then its
// scales [n_heads, block_size].
#include "ops/kv_store/op.hpp"

#include "ops/cuda/kv_bytes.cuh"

#include <algorithm>

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

constexpr int64_t kMoves = 256; // per launch, passed as kernel parameters (2 KiB)

struct Moves {
    int32_t blocks[kMoves];
    int32_t host_slots[kMoves];
};

// words: of the keys, or of the values, of a block.
template <typename Word>
__global__ void kv_blocks_kernel(bool to_host, std::byte *k_cache, std::byte *v_cache,
                                 std::byte *host, int64_t slot_stride_bytes, int64_t words,
                                 Moves moves) {
    cuda::grid_dependency_wait();
    const int64_t bytes = words * int64_t(sizeof(Word));
    std::byte *cache = blockIdx.y == 0 ? k_cache : v_cache;
    Word *block = reinterpret_cast<Word *>(cache + moves.blocks[blockIdx.x] * bytes);
    Word *slot = reinterpret_cast<Word *>(host + moves.host_slots[blockIdx.x] * slot_stride_bytes +
                                          blockIdx.y * bytes);
    Word *to = to_host ? slot : block;
    const Word *from = to_host ? block : slot;
    for (int64_t i = threadIdx.x; i < words; i += kThreads) {
        to[i] = from[i];
    }
}

// words: of the bytes of the keys, or of the values, of a block. Scales move in units of Scale: f32, or
// bytes where they are not aligned.
template <typename Word, typename Scale>
__global__ void kv_blocks_bytes_kernel(bool to_host, cuda::KvBytes k_cache, cuda::KvBytes v_cache,
                                       std::byte *host, int64_t slot_stride_bytes,
                                       int64_t block_size, int64_t words, Moves moves) {
    cuda::grid_dependency_wait();
    const cuda::KvBytes &cache = blockIdx.y == 0 ? k_cache : v_cache;
    const int64_t first = moves.blocks[blockIdx.x] * block_size; // KV slot
    const int64_t bytes = words * int64_t(sizeof(Word));
    const int64_t head_scales = block_size * int64_t(sizeof(float) / sizeof(Scale));
    const int64_t scale_bytes = cache.n_heads * block_size * int64_t(sizeof(float));
    std::byte *slot = host + moves.host_slots[blockIdx.x] * slot_stride_bytes +
                      blockIdx.y * (bytes + scale_bytes);
    Word *values = reinterpret_cast<Word *>(cache.values + cache.row_at(first, 0));
    Word *host_values = reinterpret_cast<Word *>(slot);
    for (int64_t i = threadIdx.x; i < words; i += kThreads) {
        (to_host ? host_values : values)[i] = (to_host ? values : host_values)[i];
    }
    Scale *host_scales = reinterpret_cast<Scale *>(slot + bytes);
    for (int64_t i = threadIdx.x; i < cache.n_heads * head_scales; i += kThreads) {
        Scale *scale =
            reinterpret_cast<Scale *>(cache.scale_at(first, i / head_scales)) + i % head_scales;
        *(to_host ? host_scales + i : scale) = *(to_host ? scale : host_scales + i);
    }
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

void kv_blocks_cuda(const device::Stream &stream, KvDirection direction, const KvLayer &kv,
                    int64_t block_size, const KvHost &host, const int32_t *blocks,
                    const int32_t *host_slots, int64_t n) {
    const int64_t bytes = kv.k.bytes() / kv.n_slots * block_size;
    const bool is_even = bytes % int64_t(sizeof(uint4)) == 0;
    const int64_t words = bytes / int64_t(is_even ? sizeof(uint4) : sizeof(uint16_t));
    const auto kernel = is_even ? kv_blocks_kernel<uint4> : kv_blocks_kernel<uint16_t>;
    const bool is_bytes = is_eight_bits(kv.k.dtype());
    const int64_t value_bytes = block_size * kv.n_heads * kv.head_dim;
    const bool has_words = is_even && value_bytes % int64_t(sizeof(uint4)) == 0 &&
                           kv.n_slots * kv.n_heads * kv.head_dim % int64_t(sizeof(float)) == 0;
    const auto bytes_kernel =
        has_words ? kv_blocks_bytes_kernel<uint4, float> : kv_blocks_bytes_kernel<uint8_t, uint8_t>;
    for (int64_t first = 0; first < n; first += kMoves) {
        const int64_t count = std::min(kMoves, n - first);
        Moves moves;
        std::copy_n(blocks + first, count, moves.blocks);
        std::copy_n(host_slots + first, count, moves.host_slots);
        const dim3 grid(unsigned(count), kv.has_values() ? 2 : 1);
        if (is_bytes) {
            cuda::launch(device::cuda_stream_of(stream), bytes_kernel, grid, kThreads, 0, true,
                         direction == KvDirection::to_host, cuda::kv_bytes(kv.k),
                         cuda::kv_bytes(kv.v), host.data, host.slot_stride_bytes, block_size,
                         has_words ? value_bytes / int64_t(sizeof(uint4)) : value_bytes, moves);
            continue;
        }
        cuda::launch(device::cuda_stream_of(stream), kernel, grid, kThreads, 0, true,
                     direction == KvDirection::to_host, kv.k.data(), kv.values().data(), host.data,
                     host.slot_stride_bytes, words, moves);
    }
}

} // namespace llaisys::ops
