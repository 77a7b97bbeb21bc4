// Weight formats of the CPU.
#pragma once

#include "ops/linear/format.hpp"

namespace llaisys::ops {

// f32, f16 and bf16, each as panels [ceil(out / 32), in, 32] of its own dtype
// (ops/cpu/kernels.hpp), those in strips, and the quantised ones.
LinearFormats linear_formats_cpu();

// Bytes of the panels of a weight [out, in]; the dtype must have a format.
int64_t linear_bytes_cpu(DType dtype, int64_t out_features, int64_t in_features);

// bf16 and i8_channel in strips (ops/cpu/strip_kernels.hpp), where the machine has their kernels: u8
// [strips, bytes of a strip]; i8_channel with scales f32 [outputs, padded]. Packing i8_channel throws
// for more than 131,072 columns.
extern const LinearFormat kBf16Strips;
extern const LinearFormat kChannelStrips;
// Throws unless all blocks of a row of an i8_channel weight have the same scale.
void check_channel_scales(const device::Stream &stream, const Tensor &weight);
int64_t strip_bytes(DType dtype, int64_t out_features, int64_t in_features);

// Quantised (ops/cpu/quant_panels.hpp): u8 [panels, bytes of a panel]. Packing throws when
// in_features is not a multiple of the format's block: 32, 128, or 256. Dequantised rows are exactly
// s * (q - zero), s * q - m or s * (q - z), each rounded as the formats' definition does.
LinearFormat::Pack pack_quantised;
LinearFormat::RunGroups run_quantised;
LinearFormat::Rows rows_of_quantised;

} // namespace llaisys::ops
