// Host memory for blocks that lost their place in the KV cache: a second level, filled and emptied
// by copies. Which block lies in which place is for the caller to know.
#pragma once

#include "ops/kv_blocks/op.hpp"
#include "runtime/kv_cache/kv_storage.hpp"

namespace llaisys::runtime {

class KvHostPool {
public:
    // Allocates it all. Neither stream nor storage is owned; both outlive the pool.
    KvHostPool(const device::Stream &stream, const KvStorage &storage, int32_t block_size,
               int32_t n_places);
    ~KvHostPool();
    KvHostPool(const KvHostPool &) = delete;
    KvHostPool &operator=(const KvHostPool &) = delete;

    // Block blocks[i] of all layers to or from place places[i], in order with steps. Both are
    // checked, and that nothing is written twice, before anything moves.
    void move(ops::KvDirection direction, const int32_t *blocks, const int32_t *places, int32_t n);

private:
    const device::Stream &stream_;
    const KvStorage &storage_;
    int64_t block_size_;
    int64_t block_bytes_; // of one layer, keys and values
    ops::KvHost host_;    // of the first layer; the others follow inside a place
    std::vector<int32_t> written_;
};

} // namespace llaisys::runtime
