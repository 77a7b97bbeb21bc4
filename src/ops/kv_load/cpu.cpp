#include "ops/kv_load/cpu.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

namespace {

void load(const device::Stream &stream, const Tensor &rows, const Tensor &cache,
          const Tensor &slots) {
    const int64_t width = cache.size(1) * cache.size(2);
    const cpu::Kernels &kernels = cpu::kernels();
    cpu::for_rows(stream, rows.size(0), width, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            cpu::convert(kernels, cpu::row_of(rows, i), rows.dtype(),
                         cpu::row_of(cache, slots.as<int32_t>()[i]), cache.dtype(), width);
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
