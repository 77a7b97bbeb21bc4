#include "ops/kv_store/op.hpp"

namespace llaisys::ops {

void kv_store(const device::Stream &stream, const KvLayer &kv, const Tensor &k, const Tensor *v,
              const Tensor &slots) {
    const Checks check{"kv_store", stream};
    check_kv(check, kv);
    check.writable("k_cache", kv.k);
    check.writable("v_cache", kv.values());
    const int64_t n = k.size(0);
    check_kv_rows(check, "values", k, kv, n);
    if (v != nullptr) {
        check_has_values(check, kv);
        check_kv_rows(check, "values", *v, kv, n);
    }
    check.vector("slots", slots, LLAISYS_DTYPE_I32, n);
    check.index_range("slots", slots, kv.n_slots);
    check.dispatch(LLAISYS_KERNELS(kv_store), kv, k, v, slots);
}

void kv_load(const device::Stream &stream, const Tensor &k, const Tensor *v, const KvLayer &kv,
             const Tensor &slots) {
    const Checks check{"kv_load", stream};
    check_kv(check, kv);
    const auto check_output = [&](const char *name, const Tensor &rows) {
        check_kv_rows(check, name, rows, kv, k.size(0));
        check.writable(name, rows);
        check.contiguous(name, rows);
    };
    check_output("k", k);
    if (v != nullptr) {
        check_has_values(check, kv);
        check_output("v", *v);
    }
    check.vector("slots", slots, LLAISYS_DTYPE_I32, k.size(0));
    check.index_range("slots", slots, kv.n_slots);
    check.dispatch(LLAISYS_KERNELS(kv_load), k, v, kv, slots);
}

namespace {

void check_numbers(const char *name, const int32_t *numbers, int64_t n, int64_t limit) {
    for (int64_t i = 0; i < n; ++i) {
        require(numbers[i] >= 0 && numbers[i] < limit, "kv_blocks: ", name, "[", i,
                "] must be in [0, ", limit, "), got ", numbers[i]);
    }
}

} // namespace

void kv_blocks(const device::Stream &stream, KvDirection direction, const KvLayer &kv,
               int64_t block_size, const KvHost &host, const int32_t *blocks,
               const int32_t *host_slots, int64_t n) {
    const Checks check{"kv_blocks", stream};
    check_kv(check, kv);
    check.writable("k_cache", kv.k);
    check.writable("v_cache", kv.values());
    check_numbers("blocks", blocks, n, kv.n_slots / block_size);
    check_numbers("host_slots", host_slots, n, host.n_slots);
    check.dispatch(LLAISYS_KERNELS(kv_blocks), direction, kv, block_size, host, blocks, host_slots,
                   n);
}

} // namespace llaisys::ops
