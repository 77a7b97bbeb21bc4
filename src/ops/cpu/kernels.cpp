#include "ops/cpu/kernels.hpp"

#include <atomic>

namespace llaisys {

// Each is defined in the file of its instruction set.
namespace cpu_portable {
extern const ops::cpu::Kernels kernels;
}
#if defined(LLAISYS_HAVE_AVX2)
namespace cpu_avx2 {
extern const ops::cpu::Kernels kernels;
}
#endif
#if defined(LLAISYS_HAVE_AVX512)
namespace cpu_avx512 {
extern const ops::cpu::Kernels kernels;
}
#endif
#if defined(LLAISYS_HAVE_NEON)
namespace cpu_neon {
extern const ops::cpu::Kernels kernels;
}
#endif

} // namespace llaisys

namespace llaisys::ops::cpu {

namespace {

std::atomic<const Kernels *> chosen{nullptr};

} // namespace

void no_rows(DType dtype) {
    fail(LLAISYS_ERROR_INTERNAL, "rows of dtype ", name_of(dtype), " cannot be computed on");
}

const Kernels *kernels_of(device::Isa isa) {
    if (!device::has_isa(isa)) {
        return nullptr;
    }
    switch (isa) {
    case device::Isa::portable:
        return &cpu_portable::kernels;
#if defined(LLAISYS_HAVE_AVX2)
    case device::Isa::avx2:
        return &cpu_avx2::kernels;
#endif
#if defined(LLAISYS_HAVE_AVX512)
    case device::Isa::avx512:
        return &cpu_avx512::kernels;
#endif
#if defined(LLAISYS_HAVE_NEON)
    case device::Isa::neon:
        return &cpu_neon::kernels;
#endif
    default:
        return nullptr;
    }
}

const Kernels &kernels() {
    const Kernels *table = chosen.load(std::memory_order_relaxed);
    if (table == nullptr) {
        table = kernels_of(device::cpu_isa());
        ensure(table != nullptr, "no kernels for ", device::name_of(device::cpu_isa()));
        chosen.store(table, std::memory_order_relaxed);
    }
    return *table;
}

bool use_kernels_of(device::Isa isa) {
    const Kernels *table = kernels_of(isa);
    if (table != nullptr) {
        chosen.store(table, std::memory_order_relaxed);
    }
    return table != nullptr;
}

} // namespace llaisys::ops::cpu
