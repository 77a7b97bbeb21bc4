#include "ops/kv_load/op.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

namespace {

// Dequantise 8-bit rows.
void load_quantised(const device::Stream &stream, const Tensor &rows, const Tensor &cache,
                    const Tensor &slots) {
    const int64_t heads = rows.size(1);
    const int64_t d = rows.size(2);
    const cpu::Kernels &kernels = cpu::kernels();
    cpu::for_rows(stream, rows.size(0), heads * d, [&](int64_t first, int64_t last) {
        float buffer[kMaxQuantisedHead];
        for (int64_t i = first; i < last; ++i) {
            const int8_t *from = cache.as<int8_t>() + slots.as<int32_t>()[i] * cache.stride(0);
            for (int64_t h = 0; h < heads; ++h, from += cache.stride(1)) {
                float scale;
                std::memcpy(&scale, from + d, sizeof scale);
                const cpu::Values to = cpu::row_of(rows, i, h);
                float *values = cpu::target(to, buffer);
                kernels.dequantise(values, from, scale, d);
                cpu::finish(kernels, to, values, d);
            }
        }
    });
}

void load(const device::Stream &stream, const Tensor &rows, const Tensor &cache,
          const Tensor &slots) {
    if (cache.dtype() == LLAISYS_DTYPE_I8 && rows.dtype() != LLAISYS_DTYPE_I8) {
        return load_quantised(stream, rows, cache, slots);
    }
    const int64_t width = cache.size(1) * cache.size(2);
    const cpu::Kernels &kernels = cpu::kernels();
    cpu::for_rows(stream, rows.size(0), width, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            cpu::convert(kernels, cpu::row_of(rows, i), cpu::row_of(cache, slots.as<int32_t>()[i]),
                         width);
        }
    });
}

} // namespace

void kv_load_cpu(const device::Stream &stream, const Tensor &k, const Tensor *v, const KvLayer &kv,
                 const Tensor &slots) {
    load(stream, k, kv.k, slots);
    if (v != nullptr) {
        load(stream, *v, kv.v, slots);
    }
}

} // namespace llaisys::ops
