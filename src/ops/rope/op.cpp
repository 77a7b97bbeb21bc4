#include "ops/rope/op.hpp"

#include "ops/checks.hpp"

namespace llaisys::ops {

namespace {

void check_rope(const Checks &check, const Tensor &out, const Tensor &in, const Tensor &positions,
                const Tensor &inv_freq) {
    check.real_rows("in", in, 3);
    const int64_t n = in.size(0);
    const int64_t heads = in.size(1);
    const int64_t d = in.size(2);
    require(d % 2 == 0, "rope: in: got shape ", in.shape(), ", expected an even last dimension");
    check.real_output("out", out, {n, heads, d});
    check.vector("positions", positions, LLAISYS_DTYPE_I64, n);
    check.vector("inv_freq", inv_freq, LLAISYS_DTYPE_F32, d / 2);
}

} // namespace

void rope(const device::Stream &stream, const Tensor &out, const Tensor &in,
          const Tensor &positions, const Tensor &inv_freq, float factor) {
    const Checks check{"rope", stream};
    check_rope(check, out, in, positions, inv_freq);
    check.dispatch(LLAISYS_KERNELS(rope), out, in, positions, inv_freq, factor);
}

void rope_both(const device::Stream &stream, const Tensor &q, const Tensor &k,
               const Tensor &positions, const Tensor &inv_freq, float factor) {
    if (stream.type() != LLAISYS_DEVICE_CPU) {
        rope(stream, q, q, positions, inv_freq, factor);
        return rope(stream, k, k, positions, inv_freq, factor);
    }
    const Checks check{"rope", stream};
    check_rope(check, q, q, positions, inv_freq);
    check_rope(check, k, k, positions, inv_freq);
    rope_both_cpu(stream, q, k, positions, inv_freq, factor);
}

Tensor layer_frequencies(const Tensor &inv_freq, int64_t layer) {
    if (inv_freq.ndim() == 1) {
        return inv_freq;
    }
    return inv_freq.slice(0, layer, layer + 1).view({inv_freq.size(1)});
}

} // namespace llaisys::ops
