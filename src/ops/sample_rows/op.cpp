#include "ops/sample_rows/op.hpp"

#include "ops/checks.hpp"
#include "ops/sample_rows/cpu.hpp"
#include "ops/sample_rows/cuda.hpp"

namespace llaisys::ops {

namespace {

void check_vector(const Checks &check, const char *name, const Tensor &tensor, DType dtype,
                  int64_t n) {
    check.device(name, tensor);
    check.dtype(name, tensor, dtype);
    check.shape(name, tensor, {n});
    check.contiguous(name, tensor);
}

void check_table(const Checks &check, const char *name, const Tensor &tensor, DType dtype,
                 int64_t n, int64_t width) {
    check.device(name, tensor);
    check.dtype(name, tensor, dtype);
    check.shape(name, tensor, {n, width});
    check.contiguous(name, tensor);
}

} // namespace

void adjust_rows(const device::Stream &stream, const Tensor &out, const Tensor &logits,
                 const RowAdjustments &adjustments) {
    const Checks check{"adjust_rows", stream};
    check.real_rows("logits", logits, 2);
    check.dtype("logits", logits, LLAISYS_DTYPE_F32);
    check.contiguous("logits", logits);
    const int64_t n = adjustments.rows.size(0);
    check.real_output("out", out, 2);
    check.dtype("out", out, LLAISYS_DTYPE_F32);
    check.shape("out", out, {n, logits.size(1)});
    check.contiguous("out", out);
    check_vector(check, "rows", adjustments.rows, LLAISYS_DTYPE_I32, n);
    check_vector(check, "mask_rows", adjustments.mask_rows, LLAISYS_DTYPE_I32, n);
    check_vector(check, "bias_offsets", adjustments.bias_offsets, LLAISYS_DTYPE_I32, n + 1);
    check_vector(check, "history_offsets", adjustments.history_offsets, LLAISYS_DTYPE_I32, n + 1);
    if (adjustments.pending_rows.defined()) {
        check_vector(check, "pending_rows", adjustments.pending_rows, LLAISYS_DTYPE_I32, n);
        check_vector(check, "sampled", adjustments.sampled, LLAISYS_DTYPE_I64,
                     adjustments.sampled.size(0));
    }
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return adjust_rows_cpu(stream, out, logits, adjustments);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return adjust_rows_cuda(stream, out, logits, adjustments);
#endif
    default:
        check.no_kernel();
    }
}

void weigh_rows(const device::Stream &stream, const Tensor &sums, const Tensor &picks,
                const Tensor &logits, const Tensor &best, const Tensor &rows,
                const Tensor &temperatures, const Tensor &uniforms) {
    const Checks check{"weigh_rows", stream};
    check.real_rows("logits", logits, 2);
    check.dtype("logits", logits, LLAISYS_DTYPE_F32);
    check.contiguous("logits", logits);
    const int64_t n = sums.size(0);
    check_vector(check, "sums", sums, LLAISYS_DTYPE_I64, n);
    check.real_rows("best", best, 2);
    check.dtype("best", best, LLAISYS_DTYPE_F32);
    check.shape("best", best, {logits.size(0), best.size(1)});
    check.contiguous("best", best);
    if (rows.defined()) {
        check_vector(check, "rows", rows, LLAISYS_DTYPE_I32, n);
    }
    if (temperatures.defined()) {
        check_vector(check, "temperatures", temperatures, LLAISYS_DTYPE_F32, n);
    }
    if (uniforms.defined()) {
        check_vector(check, "uniforms", uniforms, LLAISYS_DTYPE_I64, n);
        check_vector(check, "picks", picks, LLAISYS_DTYPE_I32, n);
    }
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return weigh_rows_cpu(stream, sums, picks, logits, best, rows, temperatures, uniforms);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return weigh_rows_cuda(stream, sums, picks, logits, best, rows, temperatures, uniforms);
#endif
    default:
        check.no_kernel();
    }
}

void sample_rows(const device::Stream &stream, const Tensor &ids, const Tensor &is_open,
                 const Tensor &logits, const Tensor &best_ids, const Tensor &best,
                 const Tensor &sums, const Tensor &picks, const RowSampling &samples) {
    const Checks check{"sample_rows", stream};
    const int64_t n = ids.size(0);
    check.real_rows("logits", logits, 2);
    check_table(check, "logits", logits, LLAISYS_DTYPE_F32, best.size(0), logits.size(1));
    const int64_t k = logits.size(1) < kMaxTopK ? logits.size(1) : kMaxTopK;
    check_vector(check, "ids", ids, LLAISYS_DTYPE_I64, n);
    check_vector(check, "is_open", is_open, LLAISYS_DTYPE_I32, n);
    check_table(check, "best", best, LLAISYS_DTYPE_F32, best.size(0), k);
    check_table(check, "best_ids", best_ids, LLAISYS_DTYPE_I32, best.size(0), k);
    check_vector(check, "sums", sums, LLAISYS_DTYPE_I64, n);
    check_vector(check, "picks", picks, LLAISYS_DTYPE_I32, n);
    if (samples.rows.defined()) {
        check_vector(check, "rows", samples.rows, LLAISYS_DTYPE_I32, n);
    }
    check_vector(check, "kinds", samples.kinds, LLAISYS_DTYPE_I32, n);
    check_vector(check, "temperatures", samples.temperatures, LLAISYS_DTYPE_F32, n);
    check_vector(check, "uniforms", samples.uniforms, LLAISYS_DTYPE_I64, n);
    check_vector(check, "processor_offsets", samples.processor_offsets, LLAISYS_DTYPE_I32, n + 1);
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return sample_rows_cpu(stream, ids, is_open, logits, best_ids, best, sums, picks, samples);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return sample_rows_cuda(stream, ids, is_open, logits, best_ids, best, sums, picks, samples);
#endif
    default:
        check.no_kernel();
    }
}

void rank_rows(const device::Stream &stream, const RowRanks &out, const Tensor &ids,
               const Tensor &logits, const Tensor &rows, const Tensor &best_ids,
               const Tensor &best) {
    const Checks check{"rank_rows", stream};
    const int64_t n = ids.size(0);
    const int64_t m = out.tops.size(1);
    check_vector(check, "logits of the sampled", out.logits, LLAISYS_DTYPE_F32, n);
    check_vector(check, "ranks", out.ranks, LLAISYS_DTYPE_I32, n);
    check_table(check, "top_ids", out.top_ids, LLAISYS_DTYPE_I32, n, m);
    check_table(check, "tops", out.tops, LLAISYS_DTYPE_F32, n, m);
    check_table(check, "best_ids", best_ids, LLAISYS_DTYPE_I32, logits.size(0), best.size(1));
    check_table(check, "best", best, LLAISYS_DTYPE_F32, logits.size(0), best.size(1));
    require(m <= best.size(1), "rank_rows: tops: got ", m, " a row, expected at most ",
            best.size(1));
    check_vector(check, "ids", ids, LLAISYS_DTYPE_I64, n);
    check_vector(check, "rows", rows, LLAISYS_DTYPE_I32, n);
    check.real_rows("logits", logits, 2);
    check.dtype("logits", logits, LLAISYS_DTYPE_F32);
    check.contiguous("logits", logits);
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return rank_rows_cpu(stream, out, ids, logits, rows, best_ids, best);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return rank_rows_cuda(stream, out, ids, logits, rows, best_ids, best);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
