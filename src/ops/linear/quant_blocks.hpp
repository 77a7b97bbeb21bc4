// Reads the blocks of quantised tensors, in the layout of llaisys/types.h, row by row (ops/quantise
// writes some of them).
#pragma once

#include "base/dtype.hpp"
#include "ops/cpu/quant_panels.hpp"

namespace llaisys::ops {

// One unpacked block: value i is s * (q[i] - zero), or s * q[i] - m, with s and m as defined in
// quant_panels.hpp for the layout of the format.
struct QuantBlock {
    uint8_t q[256];     // 8-bit layouts: the bits of the signed value
    uint16_t d;         // f16 bits: s of a plain format, d of a super one
    uint16_t min;       // f16 bits: m of a plain format, dmin of a super one, z of a grouped one
    float s;            // of a grouped format
    uint8_t scales[16]; // super formats: of each group of 16 or 32 values
    uint8_t mins[16];
};

// The packed layout of tensors of this dtype; throws for a dtype that is not quantised.
const cpu::QuantLayout &quant_layout_of(DType dtype);

// Unpack the block at `block`; throws for a dtype that is not quantised.
void read_block(DType dtype, const std::byte *block, QuantBlock *out);

} // namespace llaisys::ops
