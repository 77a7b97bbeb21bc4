#include "ops/kv_store/op.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

namespace {

// Quantise rows to 8 bits, one scale per head.
void store_quantised(const device::Stream &stream, const Tensor &cache, const Tensor &values,
                     const Tensor &slots) {
    const int64_t heads = values.size(1);
    const int64_t d = values.size(2);
    const cpu::Kernels &kernels = cpu::kernels();
    cpu::for_rows(stream, values.size(0), heads * d, [&](int64_t first, int64_t last) {
        float buffer[kMaxQuantisedHead];
        for (int64_t i = first; i < last; ++i) {
            int8_t *to = cache.as<int8_t>() + slots.as<int32_t>()[i] * cache.stride(0);
            for (int64_t h = 0; h < heads; ++h, to += cache.stride(1)) {
                const float *row = cpu::read(kernels, cpu::row_of(values, i, h), buffer, d);
                const float scale = kernels.quantise(to, row, d);
                std::memcpy(to + d, &scale, sizeof scale);
            }
        }
    });
}

void store(const device::Stream &stream, const Tensor &cache, const Tensor &values,
           const Tensor &slots) {
    if (cache.dtype() == LLAISYS_DTYPE_I8 && values.dtype() != LLAISYS_DTYPE_I8) {
        return store_quantised(stream, cache, values, slots);
    }
    const int64_t n = values.size(0);
    const int64_t heads = cache.size(1);
    const int64_t d = cache.size(2);
    const cpu::Kernels &kernels = cpu::kernels();
    const bool dense = values.stride(1) == d || heads == 1;
    cpu::for_rows(stream, n, heads * d, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const int64_t slot = slots.as<int32_t>()[i];
            const cpu::Values to = cpu::values_of(cache, slot * heads * d);
            for (int64_t h = 0; h < (dense ? 1 : heads); ++h) {
                cpu::convert(kernels, to.from(h * d), cpu::row_of(values, i, h),
                             dense ? heads * d : d);
            }
        }
    });
}

} // namespace

void kv_store_cpu(const device::Stream &stream, const KvLayer &kv, const Tensor &k, const Tensor *v,
                  const Tensor &slots) {
    store(stream, kv.k, k, slots);
    if (v != nullptr) {
        store(stream, kv.v, *v, slots);
    }
}

} // namespace llaisys::ops
