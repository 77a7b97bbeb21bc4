#include "ops/cpu/quant_kernels.hpp"

#include "device/cpu/amx.hpp"
#include "device/cpu/probes.hpp"

namespace llaisys {

// Each is defined in the file of its instruction set.
namespace cpu_portable {
extern const ops::cpu::QuantKernels quant_kernels;
}
#if defined(LLAISYS_HAVE_AVX2)
namespace cpu_avx2 {
extern const ops::cpu::QuantKernels quant_kernels;
}
#endif
#if defined(LLAISYS_HAVE_AVX512VNNI)
namespace cpu_avx512vnni {
extern const ops::cpu::QuantKernels quant_kernels;
}
#endif
#if defined(LLAISYS_HAVE_AMX)
namespace cpu_amx {
extern const ops::cpu::QuantKernels quant_kernels;
}
#endif
#if defined(LLAISYS_HAVE_NEON)
namespace cpu_neon {
extern const ops::cpu::QuantKernels quant_kernels;
}
#endif
#if defined(LLAISYS_HAVE_NEON_DOTPROD)
namespace cpu_neon_dotprod {
extern const ops::cpu::QuantKernels quant_kernels;
}
#endif

} // namespace llaisys

namespace llaisys::ops::cpu {

// has_i8: the machine has the dot product instructions of its architecture.
const QuantKernels *quant_kernels_of(device::Isa isa) {
    switch (isa) {
    case device::Isa::portable:
        return &cpu_portable::quant_kernels;
#if defined(LLAISYS_HAVE_AVX512VNNI)
    case device::Isa::avx512:
#if defined(LLAISYS_HAVE_AMX)
        if (device::uses_amx()) {
            return &cpu_amx::quant_kernels;
        }
#endif
        if (device::probes::has_i8()) {
            return &cpu_avx512vnni::quant_kernels;
        }
        return &cpu_avx2::quant_kernels;
#endif
#if defined(LLAISYS_HAVE_AVX2)
    case device::Isa::avx2:
        return &cpu_avx2::quant_kernels;
#endif
#if defined(LLAISYS_HAVE_NEON)
    case device::Isa::neon:
#if defined(LLAISYS_HAVE_NEON_DOTPROD)
        if (device::probes::has_i8()) {
            return &cpu_neon_dotprod::quant_kernels;
        }
#endif
        return &cpu_neon::quant_kernels;
#endif
    default:
        return &cpu_portable::quant_kernels;
    }
}

const QuantKernels &quant_kernels() { return *quant_kernels_of(kernels().isa); }

} // namespace llaisys::ops::cpu
