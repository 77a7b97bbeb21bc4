#include "ops/sample_rows/op.hpp"

#include "ops/checks.hpp"

namespace llaisys::ops {

namespace {

decltype(adjust_rows) *adjust_rows_cpu = nullptr;
decltype(weigh_rows) *weigh_rows_cpu = nullptr;
decltype(sample_rows) *sample_rows_cpu = nullptr;
decltype(rank_rows) *rank_rows_cpu = nullptr;

} // namespace

void adjust_rows(const device::Stream &stream, const Tensor &out, const Tensor &logits,
                 const RowAdjustments &adjustments) {
    const Checks check{"adjust_rows", stream};
    check.matrix("logits", logits, LLAISYS_DTYPE_F32);
    const int64_t n = adjustments.rows.size(0);
    check.dense("out", out, LLAISYS_DTYPE_F32, {n, logits.size(1)});
    check.writable("out", out);
    check.vector("rows", adjustments.rows, LLAISYS_DTYPE_I32, n);
    check.vector("mask_rows", adjustments.mask_rows, LLAISYS_DTYPE_I32, n);
    check.vector("bias_offsets", adjustments.bias_offsets, LLAISYS_DTYPE_I32, n + 1);
    check.vector("history_offsets", adjustments.history_offsets, LLAISYS_DTYPE_I32, n + 1);
    if (adjustments.pending_rows.defined()) {
        check.vector("pending_rows", adjustments.pending_rows, LLAISYS_DTYPE_I32, n);
        check.vector("sampled", adjustments.sampled, LLAISYS_DTYPE_I64,
                     adjustments.sampled.size(0));
    }
    check.dispatch(LLAISYS_KERNELS(adjust_rows), out, logits, adjustments);
}

void weigh_rows(const device::Stream &stream, const Tensor &sums, const Tensor &picks,
                const Tensor &logits, const Tensor &best, const Tensor &rows,
                const Tensor &temperatures, const Tensor &uniforms) {
    const Checks check{"weigh_rows", stream};
    check.matrix("logits", logits, LLAISYS_DTYPE_F32);
    const int64_t n = sums.size(0);
    check.vector("sums", sums, LLAISYS_DTYPE_I64, n);
    check.dense("best", best, LLAISYS_DTYPE_F32, {logits.size(0), best.size(1)});
    check.optional_vector("rows", &rows, LLAISYS_DTYPE_I32, n);
    check.optional_vector("temperatures", &temperatures, LLAISYS_DTYPE_F32, n);
    if (uniforms.defined()) {
        check.vector("uniforms", uniforms, LLAISYS_DTYPE_I64, n);
        check.vector("picks", picks, LLAISYS_DTYPE_I32, n);
    }
    check.dispatch(LLAISYS_KERNELS(weigh_rows), sums, picks, logits, best, rows, temperatures,
                   uniforms);
}

void sample_rows(const device::Stream &stream, const Tensor &ids, const Tensor &is_open,
                 const Tensor &logits, const Tensor &best_ids, const Tensor &best,
                 const Tensor &sums, const Tensor &picks, const RowSampling &samples) {
    const Checks check{"sample_rows", stream};
    const int64_t n = ids.size(0);
    check.dense("logits", logits, LLAISYS_DTYPE_F32, {best.size(0), logits.size(1)});
    const int64_t k = logits.size(1) < kMaxTopK ? logits.size(1) : kMaxTopK;
    check.vector("ids", ids, LLAISYS_DTYPE_I64, n);
    check.vector("is_open", is_open, LLAISYS_DTYPE_I32, n);
    check.dense("best", best, LLAISYS_DTYPE_F32, {best.size(0), k});
    check.dense("best_ids", best_ids, LLAISYS_DTYPE_I32, {best.size(0), k});
    check.vector("sums", sums, LLAISYS_DTYPE_I64, n);
    check.vector("picks", picks, LLAISYS_DTYPE_I32, n);
    check.optional_vector("rows", &samples.rows, LLAISYS_DTYPE_I32, n);
    check.vector("kinds", samples.kinds, LLAISYS_DTYPE_I32, n);
    check.vector("temperatures", samples.temperatures, LLAISYS_DTYPE_F32, n);
    check.vector("uniforms", samples.uniforms, LLAISYS_DTYPE_I64, n);
    check.vector("processor_offsets", samples.processor_offsets, LLAISYS_DTYPE_I32, n + 1);
    check.dispatch(LLAISYS_KERNELS(sample_rows), ids, is_open, logits, best_ids, best, sums, picks,
                   samples);
}

void rank_rows(const device::Stream &stream, const RowRanks &out, const Tensor &ids,
               const Tensor &logits, const Tensor &rows, const Tensor &best_ids,
               const Tensor &best) {
    const Checks check{"rank_rows", stream};
    const int64_t n = ids.size(0);
    const int64_t m = out.tops.size(1);
    check.vector("logits of the sampled", out.logits, LLAISYS_DTYPE_F32, n);
    check.vector("ranks", out.ranks, LLAISYS_DTYPE_I32, n);
    check.dense("top_ids", out.top_ids, LLAISYS_DTYPE_I32, {n, m});
    check.dense("tops", out.tops, LLAISYS_DTYPE_F32, {n, m});
    check.dense("best_ids", best_ids, LLAISYS_DTYPE_I32, {logits.size(0), best.size(1)});
    check.dense("best", best, LLAISYS_DTYPE_F32, {logits.size(0), best.size(1)});
    require(m <= best.size(1), "rank_rows: tops: got ", m, " a row, expected at most ",
            best.size(1));
    check.vector("ids", ids, LLAISYS_DTYPE_I64, n);
    check.vector("rows", rows, LLAISYS_DTYPE_I32, n);
    check.matrix("logits", logits, LLAISYS_DTYPE_F32);
    check.dispatch(LLAISYS_KERNELS(rank_rows), out, ids, logits, rows, best_ids, best);
}

void use_row_kernels_on_cpu(decltype(adjust_rows) *adjust, decltype(weigh_rows) *weigh,
                            decltype(sample_rows) *sample, decltype(rank_rows) *rank) {
    adjust_rows_cpu = adjust;
    weigh_rows_cpu = weigh;
    sample_rows_cpu = sample;
    rank_rows_cpu = rank;
}

} // namespace llaisys::ops
