#include "runtime/kv_cache/kv_storage.hpp"

#include "ops/kv_store/op.hpp"
#include "ops/rope/op.hpp"

namespace llaisys::runtime {

KvStorage::KvStorage(DeviceType device, int device_id, int64_t n_layers, int64_t n_slots,
                     int64_t n_heads, int64_t head_dim, DType dtype, Tensor inv_freq)
    : n_slots_(n_slots), inv_freq_(std::move(inv_freq)) {
    for (int64_t layer = 0; layer < n_layers; ++layer) {
        keys_.push_back(Tensor::create({n_slots, n_heads, head_dim}, dtype, device, device_id));
        values_.push_back(Tensor::create({n_slots, n_heads, head_dim}, dtype, device, device_id));
    }
}

int64_t KvStorage::bytes() const { return keys_.empty() ? 0 : n_layers() * 2 * keys_[0].bytes(); }

Tensor KvStorage::gather(const device::Stream &stream, const Tensor &cache, const int32_t *slots,
                         int64_t n) const {
    Tensor rows = Tensor::create({n, cache.size(1), cache.size(2)}, cache.dtype(), cache.device(),
                                 cache.device_id());
    const size_t row_bytes = size_t(bytes_of(cache.dtype(), cache.size(1) * cache.size(2)));
    for (int64_t i = 0; i < n; ++i) {
        stream.runtime().copy(rows.data() + size_t(i) * row_bytes,
                              cache.data() + size_t(slots[i]) * row_bytes, row_bytes,
                              device::CopyKind::device_to_device, stream.native());
    }
    return rows;
}

void KvStorage::copy_slots(const device::Stream &stream, const int32_t *src, const int32_t *dst,
                           int64_t n) {
    if (n == 0) {
        return;
    }
    Tensor targets =
        Tensor::create({n}, LLAISYS_DTYPE_I32, keys_[0].device(), keys_[0].device_id());
    targets.load(dst, size_t(n) * sizeof(int32_t));
    for (int64_t layer = 0; layer < n_layers(); ++layer) {
        for (const Tensor &cache : {keys(layer), values(layer)}) {
            ops::kv_store(stream, cache, gather(stream, cache, src, n), targets);
        }
    }
}

void KvStorage::shift_slots(const device::Stream &stream, const int32_t *slots,
                            const int64_t *delta, int64_t n) {
    if (n == 0) {
        return;
    }
    const DeviceType device = keys_[0].device();
    const int device_id = keys_[0].device_id();
    Tensor targets = Tensor::create({n}, LLAISYS_DTYPE_I32, device, device_id);
    targets.load(slots, size_t(n) * sizeof(int32_t));
    Tensor angles = Tensor::create({n}, LLAISYS_DTYPE_I64, device, device_id);
    angles.load(delta, size_t(n) * sizeof(int64_t));
    for (const Tensor &cache : keys_) {
        const Tensor rows = gather(stream, cache, slots, n);
        ops::rope(stream, rows, rows, angles, inv_freq_);
        ops::kv_store(stream, cache, rows, targets);
    }
}

} // namespace llaisys::runtime
