// Products with i8_channel weights by VPDPBUSD.
#define LLAISYS_CPU_NS cpu_avx512vnni
#include "device/cpu/simd_avx512.hpp"

#include "device/cpu/bytes_avx512vnni.hpp"

#include "ops/cpu/strip_bytes.hpp"
#include "ops/cpu/strip_vectors.hpp"

namespace llaisys::LLAISYS_CPU_NS {

struct ByteDot : ByteProducts {
    using Vector = vi;
    static vi dot(vi sums, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(sums, w, x); }
};

extern const ops::cpu::StripKernels byte_strips;
constexpr ops::cpu::StripKernels byte_strips = {place_byte_row, linear_units<ByteDot>, kPanel,
                                                kVectorTaskRows};

} // namespace llaisys::LLAISYS_CPU_NS
