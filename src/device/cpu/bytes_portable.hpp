// Vectors of bytes in plain C++: four lanes of four. See bytes.hpp for the names.
#pragma once

#include "device/cpu/bytes.hpp"

#include <cstddef>

namespace llaisys::LLAISYS_CPU_NS {

struct vb {
    uint8_t b[4 * kLanes];
};
constexpr bool kUnsignedWeights = false;
constexpr int kByteOffset = 0;

template <typename F> vb each_byte(const F &f) {
    vb result;
    for (int i = 0; i < 4 * kLanes; ++i) {
        result.b[i] = uint8_t(f(i));
    }
    return result;
}

inline vb load_bytes(const std::byte *p) {
    vb a;
    std::memcpy(a.b, p, sizeof a.b);
    return a;
}
inline void store_bytes(std::byte *p, vb a) { std::memcpy(p, a.b, sizeof a.b); }
inline vb low_nibbles(vb a) {
    return each_byte([&](int i) { return a.b[i] & 15; });
}
inline vb high_nibbles(vb a) {
    return each_byte([&](int i) { return a.b[i] >> 4; });
}
template <int shift, int mask> vb with_bits(vb a, vb plane) {
    return each_byte([&](int i) {
        const int bits = shift >= 0 ? plane.b[i] << (shift >= 0 ? shift : 0)
                                    : plane.b[i] >> (shift < 0 ? -shift : 0);
        return a.b[i] | (bits & mask);
    });
}
template <int n> vb sub_bytes(vb a) {
    return each_byte([&](int i) { return a.b[i] - n; });
}

struct ByteGroup {
    const int8_t *x;
};
inline ByteGroup load_group(const int8_t *x) { return {x}; }

template <int c, bool is_signed> vi dot(vi acc, vb w, const ByteGroup &x) {
    for (int lane = 0; lane < kLanes; ++lane) {
        int32_t sum = 0;
        for (int i = 0; i < 4; ++i) {
            sum += int32_t(int8_t(w.b[4 * lane + i])) * x.x[4 * c + i];
        }
        acc[lane] += sum;
    }
    return acc;
}

using vw = vi;

constexpr int32_t kSumStart = 0;
constexpr float kSumBase = 0;
inline vi start_sum(int32_t value) { return vi{value, value, value, value}; }
inline vf sum_of(vi sum) { return to_float(sum); }
inline vi broadcast_int(const int32_t *p) { return start_sum(*p); }
template <int n> vi start_sum_less(vi total) { return total * -n; }

inline vf load_u8(const std::byte *p) {
    return vf{float(p[0]), float(p[1]), float(p[2]), float(p[3])};
}
inline vf load_i8(const std::byte *p) {
    return vf{float(int8_t(p[0])), float(int8_t(p[1])), float(int8_t(p[2])), float(int8_t(p[3]))};
}
inline int32_t sum_of_16(const int8_t *p) {
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) {
        sum += p[i];
    }
    return sum;
}

constexpr bool kRowsFirst = false;
constexpr int kQuantRows = 2;
constexpr int64_t kPackedRows = kQuantRows;
constexpr int64_t quant_height(int64_t m) { return m < 2 ? 1 : 2; }
constexpr int quant_vectors(int, bool) { return 2; }

} // namespace llaisys::LLAISYS_CPU_NS
