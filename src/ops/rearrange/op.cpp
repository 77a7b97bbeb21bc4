#include "ops/rearrange/op.hpp"

#include "ops/checks.hpp"
#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

void rearrange(const device::Stream &stream, const Tensor &out, const Tensor &in) {
    const Checks check{"rearrange", stream};
    check.device("in", in);
    check.device("out", out);
    check.writable("out", out);
    check.dtype("out", out, in.dtype());
    if (out.shape() != in.shape()) {
        fail(LLAISYS_ERROR_INVALID, "rearrange: out: got shape ", out.shape().text(),
             ", expected that of in ", in.shape().text());
    }
    check.on_cpu();
    if (in.ndim() == 0 || in.elements() == 0) {
        copy_strided(out, in);
        return;
    }
    const int64_t rows = in.size(0);
    cpu::for_rows(stream, rows, in.elements() / rows, [&](int64_t first, int64_t last) {
        copy_strided(out.slice(0, first, last), in.slice(0, first, last));
    });
}

} // namespace llaisys::ops
