// Host memory for offloaded KV blocks. The caller tracks which block is in which host slot.
#pragma once

#include "ops/kv_store/op.hpp"
#include "runtime/kv_cache/kv_storage.hpp"

namespace llaisys::runtime {

class KvHostPool {
public:
    // Allocates all host slots, in the file `fd` unless it is -1 (see device/host_file.hpp): slot p
    // is the p-th of n_blocks equal parts. Neither stream nor storage is owned; both outlive the
    // pool.
    KvHostPool(const device::Stream &stream, const KvStorage &storage, int32_t block_size,
               int32_t n_blocks, int fd);
    ~KvHostPool();
    KvHostPool(const KvHostPool &) = delete;
    KvHostPool &operator=(const KvHostPool &) = delete;

    // Copies block blocks[i] of all layers to or from host slot host_slots[i], in stream order;
    // with a file, before it returns.
    // Throws before any copy when an index is out of range or a target occurs twice.
    void move(ops::KvDirection direction, const int32_t *blocks, const int32_t *host_slots,
              int32_t n);

private:
    size_t bytes() const { return size_t(host_.slot_stride_bytes) * size_t(host_.n_slots); }

    const device::Stream &stream_;
    const KvStorage &storage_;
    int64_t block_size_;
    int64_t block_bytes_; // keys and values of one layer
    ops::KvHost host_;    // first layer; the others follow inside each host slot
    bool is_file_;
    std::vector<int32_t> written_;
};

} // namespace llaisys::runtime
