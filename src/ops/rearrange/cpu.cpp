#include "ops/rearrange/op.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

namespace {

void copy_strided(const Tensor &dst, const Tensor &src) {
    if (src.elements() == 0) {
        return;
    }
    const int last = src.ndim() - 1;
    const int64_t unit = traits_of(src.dtype()).block_bytes;
    const int64_t row = last >= 0 ? src.size(last) : 1;
    const int64_t rows = src.elements() / row;
    const int64_t src_step = last >= 0 ? src.stride(last) : 1;
    const int64_t dst_step = last >= 0 ? dst.stride(last) : 1;
    Shape index = src.shape(); // counts up to the shape
    for (int dim = 0; dim <= last; ++dim) {
        index[dim] = 0;
    }
    for (int64_t r = 0; r < rows; ++r) {
        int64_t src_offset = 0;
        int64_t dst_offset = 0;
        for (int dim = 0; dim < last; ++dim) {
            src_offset += index[dim] * src.stride(dim);
            dst_offset += index[dim] * dst.stride(dim);
        }
        const std::byte *from = src.data() + src_offset * unit;
        std::byte *to = dst.data() + dst_offset * unit;
        if ((src_step == 1 && dst_step == 1) || row == 1) {
            std::memcpy(to, from, size_t(row * unit));
        } else {
            for (int64_t i = 0; i < row; ++i) {
                std::memcpy(to + i * dst_step * unit, from + i * src_step * unit, size_t(unit));
            }
        }
        for (int dim = last - 1; dim >= 0 && ++index[dim] == src.size(dim); --dim) {
            index[dim] = 0;
        }
    }
}

} // namespace

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
