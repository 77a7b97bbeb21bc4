// Products with bf16 and i8_channel weights for AMX.
#define LLAISYS_CPU_NS cpu_amx
#include "device/cpu/simd_avx512.hpp"

#include "device/cpu/bytes_avx512vnni.hpp"
#include "device/cpu/tiles_amx.hpp"

#include "ops/cpu/strip_bytes.hpp"
#include "ops/cpu/strip_tiles.hpp"

namespace llaisys::LLAISYS_CPU_NS {

extern const ops::cpu::StripKernels bf16_strips;
constexpr ops::cpu::StripKernels bf16_strips = {place_row, linear_tiles<AmxTiles, Bf16Products>,
                                                kStrip, kTileTaskRows};
extern const ops::cpu::StripKernels byte_strips;
constexpr ops::cpu::StripKernels byte_strips = {
    place_byte_row, linear_tiles<AmxTiles, ByteProducts>, kStrip, kTileTaskRows};

} // namespace llaisys::LLAISYS_CPU_NS
