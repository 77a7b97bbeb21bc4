// Copies KV blocks of a layer between device and pinned host memory. The kernel accesses host
// memory directly: one launch per layer instead of one copy per block. One thread block for the
// keys and one for the values of a KV block; bound by the host link. If the keys of a block are a
// multiple of 16 bytes, every offset is 16-byte aligned.
#include "ops/kv_blocks/cuda.hpp"

#include "ops/cuda/common.cuh"

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

} // namespace

void kv_blocks_cuda(const device::Stream &stream, KvDirection direction, const KvLayer &kv,
                    int64_t block_size, const KvHost &host, const int32_t *blocks,
                    const int32_t *host_slots, int64_t n) {
    const int64_t bytes = kv.k.bytes() / kv.n_slots * block_size;
    const bool is_even = bytes % int64_t(sizeof(uint4)) == 0;
    const int64_t words = bytes / int64_t(is_even ? sizeof(uint4) : sizeof(uint16_t));
    const auto kernel = is_even ? kv_blocks_kernel<uint4> : kv_blocks_kernel<uint16_t>;
    for (int64_t first = 0; first < n; first += kMoves) {
        const int64_t count = std::min(kMoves, n - first);
        Moves moves;
        std::copy_n(blocks + first, count, moves.blocks);
        std::copy_n(host_slots + first, count, moves.host_slots);
        cuda::launch(device::cuda_stream_of(stream), kernel, dim3(unsigned(count), 2), kThreads, 0,
                     true, direction == KvDirection::to_host, kv.k.data(), kv.v.data(), host.data,
                     host.slot_stride_bytes, words, moves);
    }
}

} // namespace llaisys::ops
