// Copies KV blocks of a layer between device and pinned host memory. The kernel accesses host
// memory directly: one launch per layer instead of one copy per block. One thread block for the
// keys and one for the values of a KV block; bound by the host link. If the keys of a block are a
// multiple of 16 bytes, every offset is 16-byte aligned. An 8-bit block is its bytes, then its
// scales [n_heads, block_size].
#include "ops/kv_blocks/op.hpp"

#include "ops/cuda/kv_bytes.cuh"

#include <algorithm>

namespace llaisys::ops {

namespace {

constexpr int kThreads = 256;
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
