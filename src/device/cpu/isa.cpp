#include "device/cpu/isa.hpp"

#include "base/check.hpp"

#include <cstdlib>
#include <string>

namespace llaisys::device {

namespace {

constexpr Isa kAll[] = {Isa::portable, Isa::neon, Isa::avx2, Isa::avx512};

// Available in this build and on this machine.
Isa choose() {
    const char *forced = std::getenv("LLAISYS_CPU_ISA");
    Isa best = Isa::portable;
    std::string names;
    for (Isa isa : kAll) {
        if (!has_isa(isa)) {
            continue;
        }
        best = isa;
        names += (names.empty() ? "" : ", ") + std::string(name_of(isa));
        if (forced != nullptr && name_of(isa) == std::string(forced)) {
            return isa;
        }
    }
    if (forced != nullptr && *forced != '\0') {
        fail(LLAISYS_ERROR_UNSUPPORTED, "LLAISYS_CPU_ISA must be one of ", names,
             " on this machine, got '", forced, "'");
    }
    return best;
}

} // namespace

bool has_isa(Isa isa) {
    switch (isa) {
    case Isa::portable:
        return true;
    case Isa::neon:
#if defined(LLAISYS_HAVE_NEON)
        return true;
#else
        return false;
#endif
    case Isa::avx2:
#if defined(LLAISYS_HAVE_AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("f16c");
#else
        return false;
#endif
    case Isa::avx512:
#if defined(LLAISYS_HAVE_AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("f16c");
#else
        return false;
#endif
    }
    return false;
}

Isa cpu_isa() {
    static const Isa isa = choose();
    return isa;
}

const char *name_of(Isa isa) {
    switch (isa) {
    case Isa::portable:
        return "portable";
    case Isa::neon:
        return "neon";
    case Isa::avx2:
        return "avx2";
    case Isa::avx512:
        return "avx512";
    }
    return "unknown";
}

} // namespace llaisys::device
