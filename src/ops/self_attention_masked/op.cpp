// A mask is turned into lists: what a token sees becomes a list of slots, in order, and the lists
// go through the attention kernel. Tokens whose lists begin alike (a causal mask) share one list.
#include "ops/self_attention_masked/op.hpp"

#include "ops/attention/op.hpp"
#include "ops/checks.hpp"

#include <limits>
#include <vector>

namespace llaisys::ops {

namespace {

// Lists of tokens [0, n) over m keys; mask [n, m] non-zero = seen.
AttentionLists lists_of(const uint8_t *mask, int64_t n, int64_t m) {
    std::vector<int32_t> rows;
    std::vector<int32_t> ends;
    std::vector<std::vector<int32_t>> lists;
    std::vector<int32_t> seen;
    for (int64_t i = 0; i < n; ++i) {
        seen.clear();
        for (int64_t j = 0; j < m; ++j) {
            if (mask[i * m + j] != 0) {
                seen.push_back(int32_t(j));
            }
        }
        const bool extends = !lists.empty() && lists.back().size() <= seen.size() &&
                             std::equal(lists.back().begin(), lists.back().end(), seen.begin());
        if (extends) {
            lists.back() = seen;
        } else {
            lists.push_back(seen);
        }
        rows.push_back(int32_t(lists.size() - 1));
        ends.push_back(int32_t(seen.size()));
    }
    AttentionLists result;
    result.q_rows = Tensor::create({n}, LLAISYS_DTYPE_I32);
    result.begin = Tensor::create({n}, LLAISYS_DTYPE_I32);
    result.end = Tensor::create({n}, LLAISYS_DTYPE_I32);
    result.tables = Tensor::create({int64_t(lists.size()), m}, LLAISYS_DTYPE_I32);
    std::copy(rows.begin(), rows.end(), result.q_rows.as<int32_t>());
    std::copy(ends.begin(), ends.end(), result.end.as<int32_t>());
    for (size_t t = 0; t < lists.size(); ++t) {
        std::copy(lists[t].begin(), lists[t].end(), result.tables.as<int32_t>() + int64_t(t) * m);
    }
    return result;
}

} // namespace

void self_attention_masked(const device::Stream &stream, const Tensor &out, const Tensor &q,
                           const Tensor &k, const Tensor &v, const Tensor &mask, float scale) {
    const Checks check{"self_attention_masked", stream};
    check.real_rows("q", q, 3);
    const int64_t n = q.size(0);
    const int64_t d = q.size(2);
    check.real_output("out", out, 3);
    check.shape("out", out, {n, q.size(1), d});
    check.real_rows("k", k, 3);
    check.contiguous("k", k);
    const int64_t m = k.size(0);
    const int64_t kv_heads = k.size(1);
    check.shape("k", k, {m, kv_heads, d});
    check.real_rows("v", v, 3);
    check.contiguous("v", v);
    check.shape("v", v, {m, kv_heads, d});
    if (kv_heads == 0 || q.size(1) % kv_heads != 0) {
        fail(LLAISYS_ERROR_INVALID, "self_attention_masked: q: got ", q.size(1),
             " heads, expected a multiple of the ", kv_heads, " of k");
    }
    check.device("mask", mask);
    check.dtype("mask", mask, LLAISYS_DTYPE_U8);
    check.shape("mask", mask, {n, m});
    check.contiguous("mask", mask);
    if (m > std::numeric_limits<int32_t>::max() || n > std::numeric_limits<int32_t>::max()) {
        fail(LLAISYS_ERROR_INVALID, "self_attention_masked: mask: got shape ", mask.shape().text(),
             ", expected sizes below 2^31");
    }
    check.on_cpu();
    attention(stream, out, q, k, v, lists_of(mask.as<uint8_t>(), n, m), scale);
}

} // namespace llaisys::ops
