#include "ops/attention/op.hpp"

#include <algorithm>

namespace llaisys::ops {

void find_attention_runs(const int32_t *q_rows, int64_t n, std::vector<int32_t> *runs,
                         std::vector<int32_t> *singles, AttentionRuns *found) {
    runs->clear();
    singles->clear();
    found->longest = 0;
    for (int64_t first = 0, end = 0; first < n; first = end) {
        for (end = first + 1; end < n && q_rows[end] == q_rows[first];) {
            ++end;
        }
        if (end - first == 1) {
            singles->push_back(int32_t(first));
        } else {
            runs->push_back(int32_t(first));
            runs->push_back(int32_t(end - first));
            found->longest = std::max(found->longest, end - first);
        }
    }
    found->is_known = true;
    found->n_runs = int64_t(runs->size()) / 2;
    found->n_singles = int64_t(singles->size());
    found->are_all_single = found->n_singles == n;
}

int64_t find_run_extents(const int32_t *end, const std::vector<int32_t> &runs,
                         std::vector<int32_t> *extents) {
    extents->clear();
    int64_t n_copied = 0;
    for (size_t i = 0; i + 1 < runs.size(); i += 2) {
        const int32_t *first = end + runs[i];
        const int32_t entries = *std::max_element(first, first + runs[i + 1]);
        extents->push_back(int32_t(n_copied));
        extents->push_back(entries);
        n_copied += (entries + kCopyPage - 1) / kCopyPage * kCopyPage;
        if (n_copied > INT32_MAX - kCopyPage) {
            return 0;
        }
    }
    return n_copied;
}

void attention(const device::Stream &stream, const Tensor &out, const Tensor &q, const KvLayer &kv,
               const AttentionLists &lists, float scale, float soft_cap, const Tensor *sinks) {
    const Checks check{"attention", stream};
    check.real_rows("q", q, 3);
    const int64_t n = q.size(0);
    const int64_t d = q.size(2);
    check_kv(check, kv);
    check.real_output("out", out, {n, q.size(1), kv.value_dim});
    require(kv.head_dim == d, "attention: k_cache: got heads of ", kv.head_dim,
            ", expected those of q, ", d);
    require(kv.n_heads != 0 && q.size(1) % kv.n_heads == 0, "attention: q: got ", q.size(1),
            " heads, expected a multiple of the ", kv.n_heads, " of k_cache");
    check.vector("q_rows", lists.q_rows, LLAISYS_DTYPE_I32, n);
    check.vector("begin", lists.begin, LLAISYS_DTYPE_I32, n);
    check.vector("end", lists.end, LLAISYS_DTYPE_I32, n);
    check.matrix("tables", lists.tables, LLAISYS_DTYPE_I32);
    require(lists.block_size >= 1, "attention: block_size: got ", lists.block_size,
            ", expected at least 1");
    require(soft_cap >= 0, "attention: soft_cap: got ", soft_cap, ", expected at least 0");
    check.optional_vector("sinks", sinks, LLAISYS_DTYPE_F32, q.size(1));
    check.index_range("q_rows", lists.q_rows, lists.tables.size(0));
    check.dispatch(LLAISYS_KERNELS(attention), out, q, kv, lists, scale, soft_cap, sinks);
}

} // namespace llaisys::ops
