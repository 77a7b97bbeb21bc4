// The part of the vector abstraction that AVX2 and AVX-512 share; included at the end of both.
#pragma once

namespace llaisys::LLAISYS_CPU_NS {

using quad = const float *;
inline quad load_quad(const float *p) { return p; }
inline quad load_single(const float *p) { return p; }
template <int lane> vf fma_lane(vf w, quad x, vf acc) { return fma(w, set1(x[lane]), acc); }

// In assembly: from intrinsics GCC 12 keeps more addresses and sums than there are registers and
// spills them in every step.
template <int times, int offset>
inline __attribute__((always_inline)) void fma_broadcast(vf &low_sum, vf &high_sum, vf low, vf high,
                                                         const float *base, int64_t stride) {
    struct Rows { // what is read, for the compiler: memory from base on
        float values[1 << 20];
    };
    const Rows &rows = *reinterpret_cast<const Rows *>(base);
    vf x;
    if constexpr (times == 0) {
        asm("vbroadcastss %c[offset](%[base]), %[x]\n\t"
            "vfmadd231ps %[x], %[low], %[low_sum]\n\t"
            "vfmadd231ps %[x], %[high], %[high_sum]"
            : [low_sum] "+v"(low_sum), [high_sum] "+v"(high_sum), [x] "=&v"(x)
            : [low] "v"(low), [high] "v"(high), [base] "r"(base), [offset] "i"(offset), "m"(rows));
    } else {
        asm("vbroadcastss %c[offset](%[base],%[stride],%c[times]), %[x]\n\t"
            "vfmadd231ps %[x], %[low], %[low_sum]\n\t"
            "vfmadd231ps %[x], %[high], %[high_sum]"
            : [low_sum] "+v"(low_sum), [high_sum] "+v"(high_sum), [x] "=&v"(x)
            : [low] "v"(low), [high] "v"(high), [base] "r"(base), [stride] "r"(stride),
              [times] "i"(times), [offset] "i"(offset), "m"(rows));
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
