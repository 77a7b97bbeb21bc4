#include "ops/cpu/byte_attention.hpp"

#include "device/cpu/probes.hpp"

#include <atomic>

namespace llaisys {

#if defined(LLAISYS_HAVE_AVX512VNNI)
namespace cpu_avx512vnni {
extern const ops::cpu::ByteAttention byte_attention; // defined in byte_attention_<isa>.cpp
}
#endif

} // namespace llaisys

namespace llaisys::ops::cpu {

namespace {

std::atomic<bool> is_allowed{true};

} // namespace

const ByteAttention *byte_attention() {
#if defined(LLAISYS_HAVE_AVX512VNNI)
    if (is_allowed.load(std::memory_order_relaxed) && kernels().isa == device::Isa::avx512 &&
        device::probes::has_i8()) {
        return &cpu_avx512vnni::byte_attention;
    }
#endif
    return nullptr;
}

void allow_byte_attention(bool allowed) { is_allowed.store(allowed, std::memory_order_relaxed); }

} // namespace llaisys::ops::cpu
