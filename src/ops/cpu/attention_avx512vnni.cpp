// Attention over keys in eight bits for AVX-512 with VNNI.
#define LLAISYS_CPU_NS cpu_avx512vnni
#include "device/cpu/simd_avx512.hpp"

#include "device/cpu/bytes_avx512vnni.hpp"

#include "ops/cpu/attention_byte_keys.hpp"
#include "ops/cpu/attention_real_values.hpp"

#include "ops/cpu/attention_kernel.hpp"

namespace llaisys::LLAISYS_CPU_NS {

extern const ops::cpu::PreparedAttention prepared_attention;
constexpr ops::cpu::PreparedAttention prepared_attention = {prepare_queries, attention_span, 128};

} // namespace llaisys::LLAISYS_CPU_NS
