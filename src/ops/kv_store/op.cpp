#include "ops/kv_store/op.hpp"

#include "ops/checks.hpp"
#include "ops/kv_store/cpu.hpp"

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
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return kv_store_cpu(stream, cache, values, slots);
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
