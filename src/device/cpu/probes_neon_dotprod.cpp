// The probes for f16 and int8 arithmetic on aarch64: FMLA (half precision) and SDOT.
#include "device/cpu/probes.hpp"

#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

namespace llaisys::device::probes {

namespace {

#if defined(__linux__)
constexpr unsigned long kHalfPrecision = 1ul << 10; // HWCAP_ASIMDHP
constexpr unsigned long kDotProduct = 1ul << 20;    // HWCAP_ASIMDDP
bool machine_has(unsigned long feature) { return (getauxval(AT_HWCAP) & feature) != 0; }
#else
constexpr unsigned long kHalfPrecision = 0;
constexpr unsigned long kDotProduct = 0;
bool machine_has(unsigned long) { return true; } // every Apple core that runs this has both
#endif

// The sum of kRoundChains chains that start at first(i), after `rounds` rounds of step(chain).
template <typename First, typename Step, typename Add>
auto run_chains(int64_t rounds, const First &first, const Step &step, const Add &add) {
    decltype(first(0)) chain[kRoundChains];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kRoundChains; ++i) {
        chain[i] = first(i);
    }
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < kRoundChains; ++i) {
            chain[i] = step(chain[i]);
        }
    }
    auto total = chain[0];
#pragma GCC unroll 16
    for (int64_t i = 1; i < kRoundChains; ++i) {
        total = add(total, chain[i]);
    }
    return total;
}

} // namespace

bool has_f16() { return machine_has(kHalfPrecision); }
bool has_i8() { return machine_has(kDotProduct); }
bool has_bf16() { return false; } // no kernel uses them
bool has_fast_bf16() { return false; }

float f16_rounds(int64_t rounds, int64_t *operations) {
    *operations = 2 * 8 * kRoundChains;
    const float16x8_t factor = vdupq_n_f16(float16_t(0.5f));
    const float16x8_t total = run_chains(
        rounds, [](int64_t i) { return vdupq_n_f16(float16_t(float(i))); },
        [=](float16x8_t chain) { return vfmaq_f16(chain, factor, factor); },
        [](float16x8_t a, float16x8_t b) { return vaddq_f16(a, b); });
    return float(vgetq_lane_f16(total, 0));
}

float i8_rounds(int64_t rounds, int64_t *operations) {
    *operations = 2 * 16 * kRoundChains;
    const int8x16_t ones = vdupq_n_s8(1);
    const int32x4_t total = run_chains(
        rounds, [](int64_t i) { return vdupq_n_s32(int32_t(i)); },
        [=](int32x4_t chain) { return vdotq_s32(chain, ones, ones); },
        [](int32x4_t a, int32x4_t b) { return vaddq_s32(a, b); });
    return float(vaddvq_s32(total));
}

float bf16_rounds(int64_t, int64_t *operations) { return float(*operations = 0); }

} // namespace llaisys::device::probes
