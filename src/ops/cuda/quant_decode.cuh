// Quantised rows (ops/quant_rows.hpp) in kernels: addresses, and the conversion of 16
// adjacent codes to pairs of T, the operands of mma.
#pragma once

#include "ops/cuda/common.cuh"
#include "ops/quant_rows.hpp"

#include <cuda_fp8.h>

#include <type_traits>

namespace llaisys::ops::cuda {

// Adjacent rows of one layout.
struct QuantMatrix {
    const unsigned char *bytes;
    const float *row_scales; // null: none
    int64_t row_bytes;
    QuantRowLayout layout;

    __device__ __forceinline__ float row_scale(int64_t row) const {
        return row_scales != nullptr ? row_scales[row] : 1.0f;
    }
};

// Calls f(std::integral_constant) with the codes.
template <typename F> void dispatch_codes(QuantCodes codes, const F &f) {
    switch (codes) {
    case QuantCodes::int4:
        return f(std::integral_constant<QuantCodes, QuantCodes::int4>{});
    case QuantCodes::int8:
        return f(std::integral_constant<QuantCodes, QuantCodes::int8>{});
    case QuantCodes::f8:
        return f(std::integral_constant<QuantCodes, QuantCodes::f8>{});
    }
}

// log2 of a group of 16, 32 or 128 values.
LLAISYS_HOST_DEVICE inline int group_shift(int group) {
    return group == 16 ? 4 : group == 32 ? 5 : 7;
}

template <typename T> struct Pair;
template <> struct Pair<bf16> {
    using Type = __nv_bfloat162;
    static __device__ __forceinline__ Type same(float x) { return __float2bfloat162_rn(x); }
};
template <> struct Pair<f16> {
    using Type = __half2;
    static __device__ __forceinline__ Type same(float x) { return __float2half2_rn(x); }
};
template <typename T> __device__ __forceinline__ typename Pair<T>::Type pair_of(uint32_t bits) {
    return *reinterpret_cast<typename Pair<T>::Type *>(&bits);
}
template <typename P> __device__ __forceinline__ uint32_t bits_of_pair(P pair) {
    return *reinterpret_cast<uint32_t *>(&pair);
}

// Parameters of a group; the bits of m are 0 for a layout without m.
struct QuantParams {
    uint32_t bits; // bf16 s, bf16 m

    __device__ __forceinline__ float s() const { return __uint_as_float(bits << 16); }
    __device__ __forceinline__ float m() const { return __uint_as_float(bits & 0xffff0000u); }
};

__device__ __forceinline__ QuantParams load_params(const unsigned char *params, int group,
                                                   int param_bytes) {
    if (param_bytes == 4) {
        return {reinterpret_cast<const uint32_t *>(params)[group]};
    }
    return {param_bytes == 2 ? uint32_t(reinterpret_cast<const uint16_t *>(params)[group])
                             : 0x3f80u}; // s = 1
}

// Codes of 16 adjacent values as loaded.
template <QuantCodes Codes> struct QuantBits {
    uint4 words;
};
template <> struct QuantBits<QuantCodes::int4> {
    uint2 words;
};

// Byte i of a word of four signed values.
__device__ __forceinline__ float int8_value(uint32_t flipped, int i) {
    // 2^23 + unsigned byte as a float
    return __uint_as_float(__byte_perm(flipped, 0x4b000000u, 0x7540u + uint32_t(i))) - 8388736.0f;
}

// Factor of the values that decode_16 returns for int4: a power of two, to be divided out of sums.
template <typename T> constexpr float kQuantFactor = std::is_same_v<T, bf16> ? 0x1p-13f : 1.0f;

// Pairs of adjacent values, low half first; int4: times kQuantFactor<T>.
template <typename T, QuantCodes Codes>
__device__ __forceinline__ void decode_16(const QuantBits<Codes> &in, const QuantParams &params,
                                          uint32_t (&out)[8]) {
    using P = typename Pair<T>::Type;
    if constexpr (Codes == QuantCodes::int4) {
        // bf16: q as the lowest bits is the subnormal number q * 2^-133. f16, whose range is too
        // small for that: 1024 + q, minus 1024.
        constexpr bool kIsBf16 = std::is_same_v<T, bf16>;
        const P s = Pair<T>::same(params.s() * (kIsBf16 ? 0x1p120f : 1.0f));
        const P m = Pair<T>::same(params.m() * kQuantFactor<T>);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t word = i < 4 ? in.words.x : in.words.y;
            const uint32_t bits = (word >> (i % 4 * 4)) & 0x000f000fu;
            P q = pair_of<T>(kIsBf16 ? bits : bits | 0x64006400u);
            if constexpr (!kIsBf16) {
                q = __hsub2(q, Pair<T>::same(1024.0f));
            }
            out[i] = bits_of_pair(__hfma2(q, s, m));
        }
    } else if constexpr (Codes == QuantCodes::int8) {
        const float s = params.s(), m = params.m();
        const uint32_t words[4] = {in.words.x, in.words.y, in.words.z, in.words.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t flipped = words[i / 2] ^ 0x80808080u;
            out[i] = pack_pair<T>(fmaf(int8_value(flipped, i % 2 * 2), s, m),
                                  fmaf(int8_value(flipped, i % 2 * 2 + 1), s, m));
        }
    } else {
        // Exponent and mantissa of e4m3 in those of T: smaller by the difference of the biases.
        constexpr bool kIsBf16 = std::is_same_v<T, bf16>;
        constexpr int kShift = kIsBf16 ? 4 : 1;
        constexpr uint32_t kBits = kIsBf16 ? 0x07f007f0u : 0x3f803f80u;
        const P scale = Pair<T>::same(params.s() * (kIsBf16 ? 0x1p120f : 0x1p8f));
        const uint32_t words[4] = {in.words.x, in.words.y, in.words.z, in.words.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) { // each byte to the high byte of a half
            const uint32_t high = __byte_perm(words[i / 2], 0, i % 2 == 0 ? 0x1404u : 0x3424u);
            const uint32_t bits = ((high >> kShift) & kBits) | (high & 0x80008000u);
            out[i] = bits_of_pair(__hmul2(pair_of<T>(bits), scale));
        }
    }
}

// The same values in f32, times `scale`.
template <QuantCodes Codes>
__device__ __forceinline__ void decode_16_floats(const QuantBits<Codes> &in,
                                                 const QuantParams &params, float scale,
                                                 float (&out)[16]) {
    const float s = params.s(), m = params.m();
    if constexpr (Codes == QuantCodes::int4) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const uint32_t word = i < 8 ? in.words.x : in.words.y;
            const uint32_t q = word >> (i % 8 / 2 * 4 + i % 2 * 16) & 15;
            out[i] = fmaf(float(q), s, m) * scale;
        }
    } else {
        const uint32_t words[4] = {in.words.x, in.words.y, in.words.z, in.words.w};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            if constexpr (Codes == QuantCodes::int8) {
                out[i] = fmaf(int8_value(words[i / 4] ^ 0x80808080u, i % 4), s, m) * scale;
            } else { // as in decode_16: the bits of e4m3 in those of a float
                const uint32_t byte = words[i / 4] >> (i % 4 * 8);
                const uint32_t bits = (byte & 0x80u) << 24 | (byte & 0x7fu) << 20;
                out[i] = __uint_as_float(bits) * 0x1p120f * s * scale;
            }
        }
    }
}

} // namespace llaisys::ops::cuda
