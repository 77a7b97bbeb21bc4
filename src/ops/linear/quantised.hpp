// The CPU's quantised formats (format.hpp): packing the blocks of a file into panels
// (ops/cpu/quant_panels.hpp), products, and dequantised rows.
#pragma once

#include "ops/linear/format.hpp"

namespace llaisys::ops {

// Throws when in_features is not a multiple of the format's block: 32, 128, or 256.
// bytes: u8 [panels, bytes of a panel].
void pack_quantised(const device::Stream &stream, const Tensor &weight, LinearWeight *packed);

// Bytes of a panel of a quantised dtype; k is whole blocks.
int64_t quantised_panel_bytes(DType dtype, int64_t k);

void run_quantised(const device::Stream &stream, const Tensor &in, const int32_t *rows,
                   const LinearGroup *groups, int64_t n_groups, int first_part, int n_parts);

// Exactly s * (q - zero), s * q - m or s * (q - z), each rounded as the formats' definition does.
void rows_of_quantised(const device::Stream &stream, const Tensor &out, const Tensor &index,
                       const LinearWeight &weight);

} // namespace llaisys::ops
