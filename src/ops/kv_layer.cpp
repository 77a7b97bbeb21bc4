#include "ops/kv_layer.hpp"

namespace llaisys::ops {

KvLayer slot_major(const Tensor &k, const Tensor &v) {
    return {k.size(0), k.size(1), k.size(2), k, v};
}

void check_kv(const Checks &check, const KvLayer &kv) {
    const auto check_cache = [&](const char *name, const Tensor &cache) {
        check.device(name, cache);
        check.real_rows(name, cache, 3);
        check.contiguous(name, cache);
        check.shape(name, cache, {kv.n_slots, kv.n_heads, kv.head_dim});
    };
    check_cache("k_cache", kv.k);
    check_cache("v_cache", kv.v);
}

} // namespace llaisys::ops
