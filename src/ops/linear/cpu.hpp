// Weight formats of the CPU.
#pragma once

#include "ops/linear/format.hpp"

namespace llaisys::ops {

// f32, f16 and bf16, each as panels [ceil(out / 32), in, 32] of its own dtype
// (ops/cpu/kernels.hpp), bf16 in tiles, and the quantised ones.
LinearFormats linear_formats_cpu();

// Bytes of the panels of a weight [out, in]; the dtype must have a format.
int64_t linear_bytes_cpu(DType dtype, int64_t out_features, int64_t in_features);

// bf16 in tile registers (ops/cpu/bf16_kernels.hpp): bf16 [strips, padded in / 2, 16, 2].
LinearFormat::Pack pack_bf16_strips;
LinearFormat::RunGroups run_bf16_strips;
LinearFormat::Rows rows_of_bf16_strips;
int64_t bf16_strip_bytes(int64_t out_features, int64_t in_features);

// Quantised (ops/cpu/quant_panels.hpp): u8 [panels, bytes of a panel]. Packing throws when
// in_features is not a multiple of the format's block: 32, 128, or 256. Dequantised rows are exactly
// s * (q - zero), s * q - m or s * (q - z), each rounded as the formats' definition does.
LinearFormat::Pack pack_quantised;
LinearFormat::RunGroups run_quantised;
LinearFormat::Rows rows_of_quantised;

} // namespace llaisys::ops
