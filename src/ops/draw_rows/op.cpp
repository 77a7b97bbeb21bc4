#include "ops/draw_rows/op.hpp"

#include "ops/checks.hpp"
#include "ops/draw_rows/cuda.hpp"

namespace llaisys::ops {

namespace {

void check_vector(const Checks &check, const char *name, const Tensor &tensor, DType dtype,
                  int64_t n) {
    check.device(name, tensor);
    check.dtype(name, tensor, dtype);
    check.shape(name, tensor, {n});
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
    switch (stream.type()) {
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
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return weigh_rows_cuda(stream, sums, picks, logits, best, rows, temperatures, uniforms);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
