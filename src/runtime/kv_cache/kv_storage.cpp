#include "runtime/kv_cache/kv_storage.hpp"

#include "device/cpu/huge_memory.hpp"
#include "ops/kv_store/op.hpp"
#include "ops/rope/op.hpp"

#include <algorithm>

namespace llaisys::runtime {

namespace {

constexpr int64_t kShiftRows = 64;
constexpr DType kWide = LLAISYS_DTYPE_F32; // 8-bit keys are rotated in f32

Tensor create(const device::Stream &stream, const Shape &shape, DType dtype) {
    return Tensor::create(shape, dtype, stream.type(), stream.device_id());
}

// Small pages: most caches never fill, and with huge pages the first token would touch 2 MiB of
// keys and of values in every layer.
ops::KvLayer make_layer(const device::Stream &stream, const Shape &shape, DType dtype,
                        int64_t value_dim) {
    const Tensor keys = create(stream, shape, dtype);
    const ops::KvLayer layer = value_dim > 0 ? ops::slot_major(keys, value_dim)
                                             : ops::slot_major(keys, create(stream, shape, dtype));
    if (stream.type() == LLAISYS_DEVICE_CPU) {
        for (const Tensor &cache : {layer.k, layer.values()}) {
            device::use_small_pages(cache.data(), size_t(cache.bytes()));
        }
    }
    return layer;
}

} // namespace

KvStorage::KvStorage(const device::Stream &stream, int64_t n_layers, int64_t n_slots,
                     int64_t n_heads, int64_t head_dim, DType dtype, Tensor inv_freq,
                     int64_t value_dim)
    : dtype_(dtype), inv_freq_(std::move(inv_freq)) {
    if (value_dim > 0 && ops::is_eight_bits(dtype)) {
        fail(LLAISYS_ERROR_UNSUPPORTED,
             "kv_cache_dtype must be f32, f16 or bf16 for a model with "
             "latent attention, got ",
             name_of(dtype));
    }
    const Shape shape{n_slots, n_heads, ops::head_stride(dtype, head_dim)};
    for (int64_t layer = 0; layer < n_layers; ++layer) {
        layers_.push_back(make_layer(stream, shape, dtype, value_dim));
    }
    const DType computed_on = is_activation(dtype) ? dtype : kWide;
    shift_rows_ = create(stream, {kShiftRows, n_heads, head_dim}, computed_on);
    shift_slots_ = create(stream, {kShiftRows}, LLAISYS_DTYPE_I32);
    shift_deltas_ = create(stream, {kShiftRows}, LLAISYS_DTYPE_I64);
}

int64_t KvStorage::bytes() const {
    int64_t bytes = 0;
    for (const ops::KvLayer &layer : layers_) {
        bytes += layer.k.storage()->bytes();
        bytes += layer.has_values() ? layer.v.storage()->bytes() : 0;
    }
    return bytes;
}

void KvStorage::copy_slots(const device::Stream &stream, const int32_t *src, const int32_t *dst,
                           int64_t n) {
    if (n == 0) {
        return;
    }
    Tensor sources = create(stream, {n}, LLAISYS_DTYPE_I32);
    Tensor targets = create(stream, {n}, LLAISYS_DTYPE_I32);
    sources.load(stream, src, size_t(n) * sizeof(int32_t));
    targets.load(stream, dst, size_t(n) * sizeof(int32_t));
    const int64_t width = ops::head_stride(dtype_, shift_rows_.size(2)); // raw bytes
    const Shape shape{n, shift_rows_.size(1), width};
    const Tensor k = create(stream, shape, dtype_);
    const bool has_values = layers_.empty() || layers_.front().has_values();
    const Tensor v = has_values ? create(stream, shape, dtype_) : Tensor();
    const Tensor *values = has_values ? &v : nullptr;
    for (const ops::KvLayer &layer : layers_) {
        ops::kv_load(stream, k, values, layer, sources);
        ops::kv_store(stream, layer, k, values, targets);
    }
}

void KvStorage::shift_slots(const device::Stream &stream, const int32_t *slots,
                            const int64_t *delta, int64_t n) {
    for (int64_t first = 0; first < n; first += kShiftRows) {
        const int64_t count = std::min(kShiftRows, n - first);
        const Tensor rows = shift_rows_.slice(0, 0, count);
        Tensor targets = shift_slots_.slice(0, 0, count);
        Tensor angles = shift_deltas_.slice(0, 0, count);
        targets.load(stream, slots + first, size_t(count) * sizeof(int32_t));
        angles.load(stream, delta + first, size_t(count) * sizeof(int64_t));
        for (size_t i = 0; i < layers_.size(); ++i) {
            const ops::KvLayer &layer = layers_[i];
            ops::kv_load(stream, rows, nullptr, layer, targets);
            const Tensor inv_freq = ops::layer_frequencies(inv_freq_, int64_t(i));
            const Tensor rotated =
                rows.slice(2, layer.head_dim - 2 * inv_freq.size(0), layer.head_dim);
            ops::rope(stream, rotated, rotated, angles, inv_freq);
            ops::kv_store(stream, layer, rows, nullptr, targets);
        }
    }
}

} // namespace llaisys::runtime
