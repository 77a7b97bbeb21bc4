// Rows of a KV cache as bf16: those of bf16 as they are, those of 8 bits converted without their scale,
// which is exact. Included after simd_avx512.hpp; compiled per instruction set.
#pragma once

#include "ops/cpu/attention_tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

static_assert(kPanel == 32); // values of bf16 in a vector

// The high halves of a and then of b: their values in bf16, where these are exact.
inline __m512i high_halves_of(__m512 a, __m512 b) {
    alignas(64) static constexpr int16_t kOdd[kPanel] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                         23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                         45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(_mm512_castps_si512(a), _mm512_load_si512(kOdd),
                                     _mm512_castps_si512(b));
}

// kPanel values.
inline __m512i load_pairs(const bf16_t *p) { return _mm512_loadu_si512(p); }
inline __m512i load_pairs(const int8_t *p) { return high_halves_of(load(p), load(p + 16)); }

// Of kPanel values of two entries: those of a column are adjacent; columns [0, 16) and [16, 32).
struct EntryPairs {
    __m512i columns[2];
};

struct PairOrder {
    int16_t lanes[2][kPanel]; // of the columns 0 to 15 and 16 to 31
};
constexpr PairOrder pair_order() {
    PairOrder order{};
    for (int16_t c = 0; c < kPanel; ++c) {
        order.lanes[c / 16][c % 16 * 2] = c;
        order.lanes[c / 16][c % 16 * 2 + 1] = int16_t(c + kPanel);
    }
    return order;
}

inline EntryPairs pairs_of_entries(const bf16_t *a, const bf16_t *b) {
    alignas(64) static constexpr PairOrder kOrder = pair_order();
    __m512i first = load_pairs(a);
    __m512i second = load_pairs(b);
    asm("" : "+v"(first), "+v"(second)); // or GCC 12 reads both twice, from L2
    return {{_mm512_permutex2var_epi16(first, _mm512_load_si512(kOrder.lanes[0]), second),
             _mm512_permutex2var_epi16(first, _mm512_load_si512(kOrder.lanes[1]), second)}};
}
inline EntryPairs pairs_of_entries(const int8_t *a, const int8_t *b) {
    const auto pairs = [](vf first, vf second) { // their high halves
        const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
        return _mm512_mask_mov_epi16(low, 0xaaaaaaaau, _mm512_castps_si512(second));
    };
    return {{pairs(load(a), load(b)), pairs(load(a + 16), load(b + 16))}};
}

// n < kPanel values, then zeros.
template <typename T> struct SomeValues {
    T values[kPanel] = {};
    SomeValues(const T *p, int64_t n) { __builtin_memcpy(values, p, size_t(n) * sizeof(T)); }
};

// Calls f(cache) with the cache pointer in its element type.
template <typename F> inline void visit_pairs(const void *cache, DType dtype, const F &f) {
    if (dtype == LLAISYS_DTYPE_I8) {
        f(static_cast<const int8_t *>(cache));
    } else {
        f(static_cast<const bf16_t *>(cache));
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
