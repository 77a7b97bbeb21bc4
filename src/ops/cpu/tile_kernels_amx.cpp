// Products with bf16 weights for AMX.
#define LLAISYS_CPU_NS cpu_amx
#include "device/cpu/simd_avx512.hpp"

#include "device/cpu/tiles_amx.hpp"

#include "ops/cpu/linear_tiles.hpp"

namespace llaisys::LLAISYS_CPU_NS {

extern const ops::cpu::TileKernels tile_kernels;
constexpr ops::cpu::TileKernels tile_kernels = {place_row, linear_tiles<AmxTiles>};

} // namespace llaisys::LLAISYS_CPU_NS
