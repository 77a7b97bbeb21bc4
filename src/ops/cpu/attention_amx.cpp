// Attention over bf16 or 8-bit keys and values for AMX.
#define LLAISYS_CPU_NS cpu_amx
#include "device/cpu/simd_avx512.hpp"

#include "device/cpu/simd.hpp"
#include "device/cpu/tiles_amx.hpp"

namespace llaisys::LLAISYS_CPU_NS {
using PairTiles = AmxTiles;
}

#include "ops/cpu/attention_pair_tiles.hpp"

#include "ops/cpu/attention_pair_keys.hpp"
#include "ops/cpu/attention_pair_values.hpp"

#include "ops/cpu/attention_kernel.hpp"
#include "ops/cpu/prepared_attention.hpp"

namespace llaisys::LLAISYS_CPU_NS {

extern const ops::cpu::PreparedAttention prepared_attention;
constexpr ops::cpu::PreparedAttention prepared_attention = {prepare_queries, attention_span, 512};

} // namespace llaisys::LLAISYS_CPU_NS
