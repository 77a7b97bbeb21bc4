#include "runtime/kv_cache/kv_host_pool.hpp"

#include "device/host_file.hpp"

#include <algorithm>

namespace llaisys::runtime {

namespace {

int64_t layer_bytes(const KvStorage &storage, int64_t block_size) {
    const ops::KvLayer &layer = storage.layers().front();
    return (layer.has_values() ? 2 : 1) * (layer.k.bytes() / layer.n_slots) * block_size;
}

} // namespace

KvHostPool::KvHostPool(const device::Stream &stream, const KvStorage &storage, int32_t block_size,
                       int32_t n_blocks, int fd)
    : stream_(stream), storage_(storage), block_size_(block_size),
      block_bytes_(layer_bytes(storage, block_size)), is_file_(fd >= 0) {
    const int64_t stride = block_bytes_ * int64_t(storage.layers().size());
    require(n_blocks <= INT64_MAX / stride, "n_blocks must be at most ", INT64_MAX / stride,
            ", got ", n_blocks);
    stream.synchronize(); // sets the thread's current device
    host_ = {nullptr, stride, n_blocks};
    void *memory = is_file_ ? device::map_host_file(stream.type(), fd, bytes())
                            : stream.runtime().allocate_host(bytes());
    host_.data = static_cast<std::byte *>(memory);
}

KvHostPool::~KvHostPool() {
    if (is_file_) {
        device::unmap_host_file(stream_.type(), host_.data, bytes());
    } else {
        stream_.runtime().release_host(host_.data);
    }
}

void KvHostPool::move(ops::KvDirection direction, const int32_t *blocks, const int32_t *host_slots,
                      int32_t n) {
    const bool to_host = direction == ops::KvDirection::to_host;
    const int32_t *targets = to_host ? host_slots : blocks;
    written_.assign(targets, targets + n);
    std::sort(written_.begin(), written_.end());
    const auto repeated = std::adjacent_find(written_.begin(), written_.end());
    require(repeated == written_.end(), to_host ? "host_slots" : "blocks", " names ",
            repeated == written_.end() ? -1 : *repeated, " twice");
    stream_.synchronize(); // sets the thread's current device
    ops::KvHost part = host_;
    for (const ops::KvLayer &layer : storage_.layers()) {
        ops::kv_blocks(stream_, direction, layer, block_size_, part, blocks, host_slots, n);
        part.data += block_bytes_;
    }
    if (is_file_) {
        stream_.synchronize();
    }
}

} // namespace llaisys::runtime
