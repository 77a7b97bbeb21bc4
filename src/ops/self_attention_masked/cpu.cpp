// Converts the mask to lists of visible slots, in order, and runs the attention kernel on them.
// Tokens whose lists share a prefix (a causal mask) share one list.
#include "ops/self_attention_masked/op.hpp"

#include "ops/attention/op.hpp"

#include <algorithm>
#include <vector>

namespace llaisys::ops {

namespace {

AttentionLists lists_of(const Tensor &mask) {
    const int64_t n = mask.size(0);
    const int64_t m = mask.size(1);
    std::vector<int32_t> rows;
    std::vector<int32_t> ends;
    std::vector<std::vector<int32_t>> lists;
    std::vector<int32_t> visible;
    for (int64_t i = 0; i < n; ++i) {
        visible.clear();
        for (int64_t j = 0; j < m; ++j) {
            if (mask.as<uint8_t>()[i * m + j] != 0) {
                visible.push_back(int32_t(j));
            }
        }
        const bool extends = !lists.empty() && lists.back().size() <= visible.size() &&
                             std::equal(lists.back().begin(), lists.back().end(), visible.begin());
        if (extends) {
            lists.back() = visible;
        } else {
            lists.push_back(visible);
        }
        rows.push_back(int32_t(lists.size() - 1));
        ends.push_back(int32_t(visible.size()));
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

void self_attention_masked_cpu(const device::Stream &stream, const Tensor &out, const Tensor &q,
                               const Tensor &k, const Tensor &v, const Tensor &mask, float scale) {
    attention(stream, out, q, slot_major(k, v), lists_of(mask), scale);
}

} // namespace llaisys::ops
