#include "ops/self_attention_masked/op.hpp"

#include "ops/checks.hpp"

#include <algorithm>
#include <limits>

namespace llaisys::ops {

void self_attention_masked(const device::Stream &stream, const Tensor &out, const Tensor &q,
                           const Tensor &k, const Tensor &v, const Tensor &mask, float scale) {
    const Checks check{"self_attention_masked", stream};
    check.real_rows("q", q, 3);
    const int64_t n = q.size(0);
    const int64_t d = q.size(2);
    check.real_output("out", out, {n, q.size(1), d});
    const int64_t m = k.size(0);
    const int64_t kv_heads = k.size(1);
    check.real_rows("k", k, {m, kv_heads, d});
    check.contiguous("k", k);
    check.real_rows("v", v, {m, kv_heads, d});
    check.contiguous("v", v);
    require(kv_heads != 0 && q.size(1) % kv_heads == 0, "self_attention_masked: q: got ", q.size(1),
            " heads, expected a multiple of the ", kv_heads, " of k");
    check.dense("mask", mask, LLAISYS_DTYPE_U8, {n, m});
    require(std::max(m, n) <= std::numeric_limits<int32_t>::max(),
            "self_attention_masked: mask: got shape ", mask.shape(), ", expected sizes below 2^31");
    check.dispatch(LLAISYS_KERNELS(self_attention_masked), out, q, k, v, mask, scale);
}

} // namespace llaisys::ops
