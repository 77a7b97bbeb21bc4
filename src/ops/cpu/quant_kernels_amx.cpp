// Products with quantised weights for AMX: tiles for many rows, VNNI for few.
#define LLAISYS_CPU_NS cpu_amx
#include "device/cpu/simd_avx512.hpp"

#include "device/cpu/bytes_avx512vnni.hpp"
#include "device/cpu/tiles_amx.hpp"

#include "ops/cpu/quant_tiles.hpp"

namespace llaisys::LLAISYS_CPU_NS {
template <typename Format> void quant_product(const QuantTask &task) {
    quant_linear_tiles<AmxTiles, Format>(task);
}
} // namespace llaisys::LLAISYS_CPU_NS

#define LLAISYS_QUANT_PRODUCT quant_product
#include "ops/cpu/quant_table.hpp"
