// Products with bf16 weights by VDPBF16PS: twice the rate of f32.
#define LLAISYS_CPU_NS cpu_avx512bf16
#include "device/cpu/simd_avx512.hpp"

#include "ops/cpu/pair_dot.hpp"
#include "ops/cpu/strip_vectors.hpp"

namespace llaisys::LLAISYS_CPU_NS {

struct Bf16Dot : Bf16Products, PairDot {};

extern const ops::cpu::StripKernels bf16_strips;
constexpr ops::cpu::StripKernels bf16_strips = {place_row, linear_units<Bf16Dot>, kPanel,
                                                kVectorTaskRows};

} // namespace llaisys::LLAISYS_CPU_NS
