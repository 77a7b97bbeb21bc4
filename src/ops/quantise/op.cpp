#include "ops/quantise/op.hpp"

#include "ops/checks.hpp"

namespace llaisys::ops {

void quantise(const device::Stream &stream, const Tensor &out, const Tensor &in) {
    const Checks check{"quantise", stream};
    check.real_rows("in", in, 2);
    check.device("out", out);
    check.writable("out", out);
    const DType to = out.dtype();
    require(to == LLAISYS_DTYPE_Q8_0 || to == LLAISYS_DTYPE_Q4_0 || to == LLAISYS_DTYPE_Q4_1 ||
                to == LLAISYS_DTYPE_F8_G128,
            "quantise: out: got dtype ", name_of(to), ", expected q8_0, q4_0, q4_1 or f8_g128");
    check.shape("out", out, {in.size(0), in.size(1)});
    check.contiguous("out", out);
    check.dispatch(quantise_cpu, nullptr, out, in);
}

} // namespace llaisys::ops
