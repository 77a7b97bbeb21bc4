#include "ops/self_attention_masked/op.hpp"

#include "ops/attention/op.hpp"

#include <algorithm>
#include <limits>
#include <vector>

namespace llaisys::ops {

namespace {

Tensor integers_on(const device::Stream &stream, const std::vector<int32_t> &values,
                   const Shape &shape) {
    Tensor tensor = Tensor::create(shape, LLAISYS_DTYPE_I32, stream.type(), stream.device_id());
    tensor.load(values.data(), values.size() * sizeof(int32_t));
    return tensor;
}

// The visible slots of each token, in order. Tokens whose lists share a prefix (a causal mask) share
// one list.
AttentionLists lists_of(const device::Stream &stream, const Tensor &mask) {
    const int64_t n = mask.size(0);
    const int64_t m = mask.size(1);
    std::vector<uint8_t> is_visible(size_t(n * m));
    mask.store(is_visible.data(), is_visible.size());
    std::vector<int32_t> rows, ends, tables, visible, last;
    for (int64_t i = 0; i < n; ++i) {
        visible.clear();
        for (int64_t j = 0; j < m; ++j) {
            if (is_visible[size_t(i * m + j)] != 0) {
                visible.push_back(int32_t(j));
            }
        }
        const bool extends = i > 0 && last.size() <= visible.size() &&
                             std::equal(last.begin(), last.end(), visible.begin());
        tables.resize(tables.size() + size_t(extends ? 0 : m));
        std::copy(visible.begin(), visible.end(), tables.end() - m);
        rows.push_back(i == 0 ? 0 : rows.back() + (extends ? 0 : 1));
        ends.push_back(int32_t(visible.size()));
        last.swap(visible);
    }
    AttentionLists lists;
    lists.q_rows = integers_on(stream, rows, {n});
    lists.begin = integers_on(stream, std::vector<int32_t>(size_t(n)), {n});
    lists.end = integers_on(stream, ends, {n});
    lists.tables = integers_on(stream, tables, {n > 0 ? rows.back() + 1 : 0, m});
    lists.runs.is_known = true;
    lists.runs.are_all_single = true;
    return lists;
}

} // namespace

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
    attention(stream, out, q, slot_major(k, v), lists_of(stream, mask), scale);
    stream.synchronize(); // the lists are freed on return
}

} // namespace llaisys::ops
