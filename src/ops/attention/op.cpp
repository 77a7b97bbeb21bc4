#include "ops/attention/op.hpp"

#include "ops/attention/cpu.hpp"
#include "ops/checks.hpp"

namespace llaisys::ops {

void attention(const device::Stream &stream, const Tensor &out, const Tensor &q,
               const Tensor &k_cache, const Tensor &v_cache, const AttentionLists &lists,
               float scale) {
    const Checks check{"attention", stream};
    check.real_rows("q", q, 3);
    const int64_t n = q.size(0);
    const int64_t d = q.size(2);
    check.real_output("out", out, 3);
    check.shape("out", out, {n, q.size(1), d});
    check.real_rows("k_cache", k_cache, 3);
    check.contiguous("k_cache", k_cache);
    const int64_t n_slots = k_cache.size(0);
    const int64_t kv_heads = k_cache.size(1);
    check.shape("k_cache", k_cache, {n_slots, kv_heads, d});
    check.real_rows("v_cache", v_cache, 3);
    check.contiguous("v_cache", v_cache);
    check.shape("v_cache", v_cache, {n_slots, kv_heads, d});
    if (kv_heads == 0 || q.size(1) % kv_heads != 0) {
        fail(LLAISYS_ERROR_INVALID, "attention: q: got ", q.size(1),
             " heads, expected a multiple of the ", kv_heads, " of k_cache");
    }
    check.vector("q_rows", lists.q_rows, LLAISYS_DTYPE_I32, n);
    check.vector("begin", lists.begin, LLAISYS_DTYPE_I32, n);
    check.vector("end", lists.end, LLAISYS_DTYPE_I32, n);
    check.device("tables", lists.tables);
    check.dtype("tables", lists.tables, LLAISYS_DTYPE_I32);
    check.ndim("tables", lists.tables, 2);
    check.contiguous("tables", lists.tables);
    if (lists.block_size < 1) {
        fail(LLAISYS_ERROR_INVALID, "attention: block_size: got ", lists.block_size,
             ", expected at least 1");
    }
    check.index_range("q_rows", lists.q_rows, lists.tables.size(0));
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return attention_cpu(stream, out, q, k_cache, v_cache, lists, scale);
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
