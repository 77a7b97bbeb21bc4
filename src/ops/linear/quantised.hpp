// The functions of the quantised formats of the CPU (format.hpp): from the blocks of a file into
// panels (ops/cpu/quant_panels.hpp), products, and rows back out.
#pragma once

#include "ops/linear/format.hpp"

namespace llaisys::ops {

// Throws when in_features is not a multiple of what the format asks for: 32, or 256 for K formats.
// bytes: u8 [panels, bytes of a panel].
void pack_quantised(const device::Stream &stream, const Tensor &weight, LinearWeight *packed);

void run_quantised(const device::Stream &stream, const Tensor &in, const LinearPart *parts,
                   int n_parts, const Tensor *rows);

// Exactly s * (q - zero) or s * q - m, each rounded as the formats' definition does.
void rows_of_quantised(const device::Stream &stream, const Tensor &out, const Tensor &index,
                       const LinearWeight &weight);

} // namespace llaisys::ops
