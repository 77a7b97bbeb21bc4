// Blocks of quantised tensors on the CPU.
#pragma once

#include "ops/cpu/quant_panels.hpp"
#include "ops/linear/quant_block.hpp"

namespace llaisys::ops {

// The packed layout of tensors of this dtype; throws for a dtype that is not quantised.
const cpu::QuantLayout &quant_layout_of(DType dtype);

// Unpack the block at `block`; throws for a dtype that is not quantised.
void read_block(DType dtype, const std::byte *block, QuantBlock *out);

} // namespace llaisys::ops
