#include "ops/kv_blocks/op.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

void kv_blocks_cpu(const device::Stream &stream, KvDirection direction, const KvLayer &kv,
                   int64_t block_size, const KvHost &host, const int32_t *blocks,
                   const int32_t *host_slots, int64_t n) {
    const int64_t width = block_size * kv.k.stride(0);
    const size_t bytes = size_t(width * cpu::bytes_of_one(kv.k.dtype()));
    cpu::for_rows(stream, n, 2 * width, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            std::byte *slot = host.data + host_slots[i] * host.slot_stride_bytes;
            for (const Tensor *cache : {&kv.k, &kv.v}) {
                if (!cache->defined()) {
                    continue; // the keys contain the values
                }
                std::byte *block = cpu::row_of(*cache, blocks[i] * block_size).data;
                if (direction == KvDirection::to_host) {
                    std::memcpy(slot, block, bytes);
                } else {
                    std::memcpy(block, slot, bytes);
                }
                slot += bytes;
            }
        }
    });
}

} // namespace llaisys::ops
