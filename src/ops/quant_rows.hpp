// Quantised weights on CUDA: row after row, each a sequence of segments of 2,048 (4 bits) or 1,024
// values (8 bits) along k; the last one may be shorter. A segment holds its codes, then the
// parameters of its groups, padded to 16 bytes, so that one bulk copy of 1 to 1.3 KB brings both.
//
//   int4   value s * q + m, q 0 to 15; in every 4 bytes, nibble j has value 2j of eight and
//          nibble j + 4 value 2j + 1: a pair of adjacent values is 16 bits apart
//   int8   value s * q (+ m), q -128 to 127
//   f8     value s * q, q e4m3 (finite), s per group or one f32 per row
//
// s and m are bf16: rounding them costs less than a hundredth of a quantisation step.
#pragma once

#include "base/dtype.hpp"
#include "base/host_device.hpp"

namespace llaisys::ops {

enum class QuantCodes { int4, int8, f8 };

LLAISYS_HOST_DEVICE constexpr int64_t quant_segment(QuantCodes codes) {
    return codes == QuantCodes::int4 ? 2048 : 1024; // values
}

struct QuantRowLayout {
    QuantCodes codes;
    int group;       // values per parameter: 16, 32 or 128
    int param_bytes; // 4: s and m; 2: s; 0: f8 with one scale per row

    LLAISYS_HOST_DEVICE constexpr int64_t code_bytes(int64_t values) const {
        return codes == QuantCodes::int4 ? values / 2 : values;
    }
    LLAISYS_HOST_DEVICE constexpr int64_t segment_bytes(int64_t values) const {
        return (code_bytes(values) + values / group * param_bytes + 15) / 16 * 16;
    }
    // k: a multiple of 32 and of the group. Long rows start at cache lines.
    LLAISYS_HOST_DEVICE constexpr int64_t row_bytes(int64_t k) const {
        const int64_t segment = quant_segment(codes);
        const int64_t bytes = k / segment * segment_bytes(segment) + segment_bytes(k % segment);
        return k < segment ? bytes : (bytes + 127) / 128 * 128;
    }
};

// The layout for a quantised dtype. Blocks of f8_g128 have one scale per row when `has_row_scales`.
QuantRowLayout quant_row_layout(DType dtype, bool has_row_scales);

} // namespace llaisys::ops
