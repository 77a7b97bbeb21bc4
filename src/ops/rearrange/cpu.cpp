#include "ops/rearrange/cpu.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

void rearrange_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in) {
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
