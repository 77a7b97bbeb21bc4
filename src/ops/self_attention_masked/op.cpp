#include "ops/self_attention_masked/op.hpp"

#include "ops/checks.hpp"
#include "ops/self_attention_masked/cpu.hpp"
#include "ops/self_attention_masked/cuda.hpp"

#include <limits>

namespace llaisys::ops {

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
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return self_attention_masked_cpu(stream, out, q, k, v, mask, scale);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return self_attention_masked_cuda(stream, out, q, k, v, mask, scale);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
