// Selection of the kernel tables: those of the instruction set, and of byte products and tile
// registers within it.
#include "ops/cpu/kernels.hpp"

#include "device/cpu/amx.hpp"
#include "device/cpu/probes.hpp"
#include "ops/cpu/prepared_attention.hpp"
#include "ops/cpu/quant_kernels.hpp"
#include "ops/cpu/strip_kernels.hpp"

#include <atomic>

namespace llaisys {

// Each is defined in the file of its instruction set, where the build has it.
namespace cpu_portable {
extern const ops::cpu::Kernels kernels;
extern const ops::cpu::QuantKernels quant_kernels;
} // namespace cpu_portable
namespace cpu_avx2 {
extern const ops::cpu::Kernels kernels;
extern const ops::cpu::QuantKernels quant_kernels;
} // namespace cpu_avx2
namespace cpu_avx512 {
extern const ops::cpu::Kernels kernels;
extern const ops::cpu::QuantKernels quant_kernels;
} // namespace cpu_avx512
namespace cpu_avx512vnni {
extern const ops::cpu::QuantKernels quant_kernels;
extern const ops::cpu::StripKernels byte_strips;
extern const ops::cpu::PreparedAttention prepared_attention;
} // namespace cpu_avx512vnni
namespace cpu_avx512bf16 {
extern const ops::cpu::StripKernels bf16_strips;
extern const ops::cpu::PreparedAttention prepared_attention;
} // namespace cpu_avx512bf16
namespace cpu_amx {
extern const ops::cpu::QuantKernels quant_kernels;
extern const ops::cpu::StripKernels bf16_strips;
extern const ops::cpu::StripKernels byte_strips;
extern const ops::cpu::PreparedAttention prepared_attention;
} // namespace cpu_amx
namespace cpu_neon {
extern const ops::cpu::Kernels kernels;
extern const ops::cpu::QuantKernels quant_kernels;
} // namespace cpu_neon
namespace cpu_neon_dotprod {
extern const ops::cpu::QuantKernels quant_kernels;
}

} // namespace llaisys

namespace llaisys::ops::cpu {

namespace {

constexpr const Kernels *kTables[] = {
    &cpu_portable::kernels,
#if defined(LLAISYS_HAVE_AVX2)
    &cpu_avx2::kernels,
#endif
#if defined(LLAISYS_HAVE_AVX512)
    &cpu_avx512::kernels,
#endif
#if defined(LLAISYS_HAVE_NEON)
    &cpu_neon::kernels,
#endif
};

std::atomic<const Kernels *> chosen{nullptr};
std::atomic<bool> is_prepared_attention_allowed{true};
std::atomic<bool> is_byte_dot_allowed{true};

[[maybe_unused]] bool uses_byte_dot() {
    return is_byte_dot_allowed.load(std::memory_order_relaxed) && device::probes::has_i8();
}

std::atomic<bool> &bf16_dot() {
    static std::atomic<bool> is_used{device::probes::has_fast_bf16()};
    return is_used;
}

[[maybe_unused]] bool uses_bf16_dot() { return bf16_dot().load(std::memory_order_relaxed); }

} // namespace

void no_rows(DType dtype) {
    fail(LLAISYS_ERROR_INTERNAL, "rows of dtype ", name_of(dtype), " cannot be computed on");
}

const Kernels *kernels_of(device::Isa isa) {
    for (const Kernels *table : kTables) {
        if (table->isa == isa && device::has_isa(isa)) {
            return table;
        }
    }
    return nullptr;
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

const QuantKernels *quant_kernels_of(device::Isa isa) {
    switch (isa) {
#if defined(LLAISYS_HAVE_AVX512)
    case device::Isa::avx512:
#if defined(LLAISYS_HAVE_AMX)
        if (device::uses_amx()) {
            return &cpu_amx::quant_kernels;
        }
#endif
#if defined(LLAISYS_HAVE_AVX512VNNI)
        if (uses_byte_dot()) {
            return &cpu_avx512vnni::quant_kernels;
        }
#endif
        return &cpu_avx512::quant_kernels;
#endif
#if defined(LLAISYS_HAVE_AVX2)
    case device::Isa::avx2:
        return &cpu_avx2::quant_kernels;
#endif
#if defined(LLAISYS_HAVE_NEON)
    case device::Isa::neon:
#if defined(LLAISYS_HAVE_NEON_DOTPROD)
        if (uses_byte_dot()) {
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

const StripKernels *strip_kernels(DType dtype) {
    if (kernels().isa != device::Isa::avx512) {
        return nullptr;
    }
    [[maybe_unused]] const bool is_bytes = dtype == LLAISYS_DTYPE_I8_CHANNEL;
#if defined(LLAISYS_HAVE_AMX)
    if (device::uses_amx()) {
        return is_bytes ? &cpu_amx::byte_strips : &cpu_amx::bf16_strips;
    }
#endif
#if defined(LLAISYS_HAVE_AVX512VNNI)
    if (is_bytes && uses_byte_dot()) {
        return &cpu_avx512vnni::byte_strips;
    }
#endif
#if defined(LLAISYS_HAVE_AVX512BF16)
    if (!is_bytes && uses_bf16_dot()) {
        return &cpu_avx512bf16::bf16_strips;
    }
#endif
    return nullptr;
}

const PreparedAttention *prepared_attention(DType keys, DType values, int64_t d) {
    if (!is_prepared_attention_allowed.load(std::memory_order_relaxed) ||
        kernels().isa != device::Isa::avx512) {
        return nullptr;
    }
    constexpr int64_t kStep = 32; // values of d per tile product, or per transposed block
    [[maybe_unused]] const bool is_bytes = keys == LLAISYS_DTYPE_I8;
    [[maybe_unused]] const bool is_bf16 =
        keys == LLAISYS_DTYPE_BF16 && values == LLAISYS_DTYPE_BF16;
    [[maybe_unused]] const bool has_steps = d % kStep == 0 && d <= kMaxTileHead;
#if defined(LLAISYS_HAVE_AMX)
    if ((is_bytes || is_bf16) && has_steps && device::uses_amx()) {
        return &cpu_amx::prepared_attention;
    }
#endif
#if defined(LLAISYS_HAVE_AVX512VNNI)
    if (is_bytes && uses_byte_dot()) {
        return &cpu_avx512vnni::prepared_attention;
    }
#endif
#if defined(LLAISYS_HAVE_AVX512BF16)
    if (is_bf16 && has_steps && uses_bf16_dot()) {
        return &cpu_avx512bf16::prepared_attention;
    }
#endif
    return nullptr;
}

void allow_byte_dot(bool allowed) { is_byte_dot_allowed.store(allowed, std::memory_order_relaxed); }

void use_bf16_dot(bool used) {
    bf16_dot().store(used && device::probes::has_bf16(), std::memory_order_relaxed);
}

void allow_prepared_attention(bool allowed) {
    is_prepared_attention_allowed.store(allowed, std::memory_order_relaxed);
}

} // namespace llaisys::ops::cpu
