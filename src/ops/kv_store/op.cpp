#include "ops/kv_store/op.hpp"

#include "ops/checks.hpp"
#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

void kv_store(const device::Stream &stream, const Tensor &cache, const Tensor &values,
              const Tensor &slots) {
    const Checks check{"kv_store", stream};
    check.real_output("cache", cache, 3);
    check.contiguous("cache", cache);
    const int64_t heads = cache.size(1);
    const int64_t d = cache.size(2);
    check.real_rows("values", values, 3);
    const int64_t n = values.size(0);
    check.shape("values", values, {n, heads, d});
    check.vector("slots", slots, LLAISYS_DTYPE_I32, n);
    check.index_range("slots", slots, cache.size(0));
    check.on_cpu();

    const cpu::Kernels &kernels = cpu::kernels();
    const bool dense = values.stride(1) == d || heads == 1;
    cpu::for_rows(stream, n, heads * d, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const int64_t slot = slots.as<int32_t>()[i];
            std::byte *to = cpu::at(cache.data(), cache.dtype(), slot * heads * d);
            for (int64_t h = 0; h < (dense ? 1 : heads); ++h) {
                cpu::convert(kernels, cpu::at(to, cache.dtype(), h * d), cache.dtype(),
                             cpu::row_of(values, i, h), values.dtype(), dense ? heads * d : d);
            }
        }
    });
}

} // namespace llaisys::ops
