#include "ops/kv_blocks/op.hpp"

namespace llaisys::ops {

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
