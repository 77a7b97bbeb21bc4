// Attention over bf16 keys and values for AVX-512 BF16.
#define LLAISYS_CPU_NS cpu_avx512bf16
#include "device/cpu/simd_avx512.hpp"

#include "ops/cpu/attention_pair_vectors.hpp"

#include "ops/cpu/attention_pair_keys.hpp"
#include "ops/cpu/attention_pair_values.hpp"

#include "ops/cpu/attention_kernel.hpp"
#include "ops/cpu/prepared_attention.hpp"

namespace llaisys::LLAISYS_CPU_NS {

extern const ops::cpu::PreparedAttention prepared_attention;
constexpr ops::cpu::PreparedAttention prepared_attention = {prepare_queries, attention_span, 128};

} // namespace llaisys::LLAISYS_CPU_NS
