#include "ops/cpu/tile_kernels.hpp"

#include "device/cpu/amx.hpp"

namespace llaisys {

#if defined(LLAISYS_HAVE_AMX)
namespace cpu_amx {
extern const ops::cpu::TileKernels tile_kernels; // defined in tile_kernels_<isa>.cpp
}
#endif

} // namespace llaisys

namespace llaisys::ops::cpu {

const TileKernels *tile_kernels() {
#if defined(LLAISYS_HAVE_AMX)
    if (kernels().isa == device::Isa::avx512 && device::uses_amx()) {
        return &cpu_amx::tile_kernels;
    }
#endif
    return nullptr;
}

} // namespace llaisys::ops::cpu
