// Probes for f16 and int8 arithmetic on x86-64; they report 0 where there is no instruction. The
// aarch64 versions are in probes_neon_dotprod.cpp.
#include "device/cpu/probes.hpp"

#if !defined(LLAISYS_HAVE_NEON_DOTPROD)

#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__)
#define LLAISYS_PROBE_AVX512 1
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wuninitialized" // gcc's own _mm512_undefined_*()
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace llaisys::device::probes {

#if defined(LLAISYS_PROBE_AVX512)

bool has_f16() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512fp16"); }
bool has_i8() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vnni"); }
bool has_bf16() { return has_i8() && __builtin_cpu_supports("avx512bf16"); }
bool has_fast_bf16() { return has_bf16() && __builtin_cpu_is("amd"); }

__attribute__((target("avx512fp16"))) float f16_rounds(int64_t rounds, int64_t *operations) {
    *operations = 2 * 32 * kRoundChains;
    const __m512h factor = _mm512_set1_ph(_Float16(0.5));
    __m512h chain[kRoundChains];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kRoundChains; ++i) {
        chain[i] = _mm512_set1_ph(_Float16(float(i)));
    }
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < kRoundChains; ++i) {
            chain[i] = _mm512_fmadd_ph(chain[i], factor, factor);
        }
    }
    __m512h total = chain[0];
#pragma GCC unroll 16
    for (int64_t i = 1; i < kRoundChains; ++i) {
        total = _mm512_add_ph(total, chain[i]);
    }
    return float(_mm512_reduce_add_ph(total));
}

__attribute__((target("avx512f,avx512vnni"))) float i8_rounds(int64_t rounds, int64_t *operations) {
    *operations = 2 * 64 * kRoundChains;
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i chain[kRoundChains];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kRoundChains; ++i) {
        chain[i] = _mm512_set1_epi32(int(i));
    }
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < kRoundChains; ++i) {
            // In place: around the intrinsic the compiler would copy each sum, which costs more
            // than the products.
            asm("vpdpbusd %1, %1, %0" : "+v"(chain[i]) : "v"(ones));
        }
    }
    __m512i total = chain[0];
#pragma GCC unroll 16
    for (int64_t i = 1; i < kRoundChains; ++i) {
        total = _mm512_add_epi32(total, chain[i]);
    }
    return float(_mm512_reduce_add_epi32(total));
}

__attribute__((target("avx512f,avx512bf16"))) float bf16_rounds(int64_t rounds,
                                                                int64_t *operations) {
    *operations = 2 * 32 * kRoundChains;
    const __m512i ones = _mm512_set1_epi16(0x3f80);
    __m512 chain[kRoundChains];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kRoundChains; ++i) {
        chain[i] = _mm512_set1_ps(float(i));
    }
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < kRoundChains; ++i) {
            asm("vdpbf16ps %1, %1, %0" : "+v"(chain[i]) : "v"(ones)); // in place, as above
        }
    }
    __m512 total = chain[0];
#pragma GCC unroll 16
    for (int64_t i = 1; i < kRoundChains; ++i) {
        total = _mm512_add_ps(total, chain[i]);
    }
    return _mm512_reduce_add_ps(total);
}

#else

bool has_f16() { return false; }
bool has_i8() { return false; }
bool has_bf16() { return false; }
bool has_fast_bf16() { return false; }
float f16_rounds(int64_t, int64_t *operations) { return float(*operations = 0); }
float i8_rounds(int64_t, int64_t *operations) { return float(*operations = 0); }
float bf16_rounds(int64_t, int64_t *operations) { return float(*operations = 0); }

#endif

} // namespace llaisys::device::probes

#endif
