// Products with quantised weights for AMX: tiles for many rows, the kernels of VNNI for few.
#define LLAISYS_CPU_NS cpu_amx
#include "device/cpu/simd_avx512.hpp"

#include "device/cpu/bytes_avx512vnni.hpp"
#include "device/cpu/tiles_amx.hpp"

#include "ops/cpu/quant_tiles.hpp"

namespace llaisys {
namespace cpu_avx512vnni {
extern const ops::cpu::QuantKernels quant_kernels;
}
namespace LLAISYS_CPU_NS {
template <typename Format> void quant_product(const QuantTask &task) {
    quant_linear_tiles<AmxTiles, Format>(task,
                                         cpu_avx512vnni::quant_kernels.products[Format::index]);
}
} // namespace LLAISYS_CPU_NS
} // namespace llaisys

#define LLAISYS_QUANT_PRODUCT quant_product
#include "ops/cpu/quant_table.hpp"
