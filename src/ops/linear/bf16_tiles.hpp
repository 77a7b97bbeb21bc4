// The CPU's format for bf16 weights in tile registers (ops/cpu/tile_kernels.hpp).
#pragma once

#include "ops/linear/format.hpp"

namespace llaisys::ops {

// bytes: bf16 [strips, padded in / 2, 16, 2].
void pack_bf16_tiles(const device::Stream &stream, const Tensor &weight, LinearWeight *packed);
int64_t bf16_tile_bytes(int64_t out_features, int64_t in_features);

void run_bf16_tiles(const device::Stream &stream, const Tensor &in, const int32_t *rows,
                    const LinearGroup *groups, int64_t n_groups, int first_part, int n_parts);

void rows_of_bf16_tiles(const device::Stream &stream, const Tensor &out, const Tensor &index,
                        const LinearWeight &weight);

} // namespace llaisys::ops
