// Products with bf16 weights for AMX.
#define LLAISYS_CPU_NS cpu_amx
#include "device/cpu/simd_avx512.hpp"

#include "device/cpu/tiles_amx.hpp"

#include "ops/cpu/bf16_tiles.hpp"

namespace llaisys::LLAISYS_CPU_NS {

extern const ops::cpu::Bf16Kernels bf16_kernels;
constexpr ops::cpu::Bf16Kernels bf16_kernels = {place_row, linear_tiles<AmxTiles>, kStrip};

} // namespace llaisys::LLAISYS_CPU_NS
