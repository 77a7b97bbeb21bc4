#include "runtime/kv_cache/kv_storage.hpp"

#include "ops/kv_store/op.hpp"
#include "ops/rope/op.hpp"

#include <algorithm>

namespace llaisys::runtime {

namespace {
constexpr int64_t kShiftRows = 64;
}

KvStorage::KvStorage(DeviceType device, int device_id, int64_t n_layers, int64_t n_slots,
                     int64_t n_heads, int64_t head_dim, DType dtype, Tensor inv_freq)
    : n_slots_(n_slots), inv_freq_(std::move(inv_freq)) {
    for (int64_t layer = 0; layer < n_layers; ++layer) {
        keys_.push_back(Tensor::create({n_slots, n_heads, head_dim}, dtype, device, device_id));
        values_.push_back(Tensor::create({n_slots, n_heads, head_dim}, dtype, device, device_id));
    }
    shift_rows_ = Tensor::create({kShiftRows, n_heads, head_dim}, dtype, device, device_id);
    shift_slots_ = Tensor::create({kShiftRows}, LLAISYS_DTYPE_I32, device, device_id);
    shift_deltas_ = Tensor::create({kShiftRows}, LLAISYS_DTYPE_I64, device, device_id);
}

int64_t KvStorage::bytes() const { return keys_.empty() ? 0 : n_layers() * 2 * keys_[0].bytes(); }

void KvStorage::gather(const device::Stream &stream, const Tensor &cache, const int32_t *slots,
                       int64_t n, const Tensor &rows) {
    const size_t row_bytes = size_t(bytes_of(cache.dtype(), cache.size(1) * cache.size(2)));
    for (int64_t i = 0; i < n; ++i) {
        stream.runtime().copy(rows.data() + size_t(i) * row_bytes,
                              cache.data() + size_t(slots[i]) * row_bytes, row_bytes,
                              device::CopyKind::device_to_device, stream.native());
    }
}

void KvStorage::copy_slots(const device::Stream &stream, const int32_t *src, const int32_t *dst,
                           int64_t n) {
    if (n == 0) {
        return;
    }
    const Tensor &like = keys_[0];
    Tensor targets = Tensor::create({n}, LLAISYS_DTYPE_I32, like.device(), like.device_id());
    targets.load(dst, size_t(n) * sizeof(int32_t));
    const Tensor rows = Tensor::create({n, like.size(1), like.size(2)}, like.dtype(), like.device(),
                                       like.device_id());
    for (int64_t layer = 0; layer < n_layers(); ++layer) {
        for (const Tensor *cache : {&keys(layer), &values(layer)}) {
            gather(stream, *cache, src, n, rows);
            ops::kv_store(stream, *cache, rows, targets);
        }
    }
}

void KvStorage::shift_slots(const device::Stream &stream, const int32_t *slots,
                            const int64_t *delta, int64_t n) {
    for (int64_t first = 0; first < n; first += kShiftRows) {
        const int64_t count = std::min(kShiftRows, n - first);
        const Tensor rows = shift_rows_.slice(0, 0, count);
        Tensor targets = shift_slots_.slice(0, 0, count);
        Tensor angles = shift_deltas_.slice(0, 0, count);
        targets.load(slots + first, size_t(count) * sizeof(int32_t));
        angles.load(delta + first, size_t(count) * sizeof(int64_t));
        for (const Tensor &cache : keys_) {
            gather(stream, cache, slots + first, count, rows);
            ops::rope(stream, rows, rows, angles, inv_freq_);
            ops::kv_store(stream, cache, rows, targets);
        }
    }
}

} // namespace llaisys::runtime
