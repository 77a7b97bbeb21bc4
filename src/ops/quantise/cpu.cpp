// Bound: arithmetic, a few operations per value and candidate scale. Loops over a block are written
// to vectorise.
#include "ops/quantise/op.hpp"

#include "ops/cpu/rows.hpp"

#include <cmath>
#include <vector>

namespace llaisys::ops {

namespace {

constexpr int kBlock = 32;

// To the nearest integer, ties to even; |x| < 2^22.
float rounded(float x) {
    constexpr float kShift = 0x1.8p23f;
    return (x + kShift) - kShift;
}

float half_of(float x, std::byte *to) {
    const f16_t half = from_f32<f16_t>(x);
    std::memcpy(to, &half, sizeof half);
    return to_f32(half);
}

// q [32] of x for the grid s * q + m, low <= q <= high; returns the sum of squared differences.
float fit(const float *x, float s, float m, float low, float high, float *q) {
    const float inverse = s != 0 ? 1 / s : 0.0f;
    float squares[kBlock];
    for (int i = 0; i < kBlock; ++i) {
        const float wanted = (x[i] - m) * inverse;
        const float inside = wanted < low ? low : wanted > high ? high : wanted;
        q[i] = rounded(inside);
        const float off = x[i] - (s * q[i] + m);
        squares[i] = off * off;
    }
    for (int n = kBlock / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; ++i) {
            squares[i] += squares[i + n];
        }
    }
    return squares[0];
}

struct Range {
    float low;
    float high;
    bool is_finite;
};

Range range_of(const float *x) {
    float low[kBlock];
    float high[kBlock];
    float tainted = 0; // NaN if any value is NaN or infinite
    for (int i = 0; i < kBlock; ++i) {
        low[i] = high[i] = x[i];
        tainted += x[i] * 0;
    }
    for (int n = kBlock / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; ++i) {
            low[i] = low[i + n] < low[i] ? low[i + n] : low[i];
            high[i] = high[i + n] > high[i] ? high[i + n] : high[i];
        }
    }
    return {low[0], high[0], tainted == 0};
}

// 16 bytes: values 0..15 in the low nibbles, 16..31 in the high ones.
void put_nibbles(const float *q, float offset, std::byte *to) {
    for (int i = 0; i < kBlock / 2; ++i) {
        to[i] = std::byte(int(q[i] + offset) | int(q[i + kBlock / 2] + offset) << 4);
    }
}

// A block whose values or scales are not finite becomes NaN.
void put_nan(std::byte *block, int64_t bytes) {
    std::memset(block, 0, size_t(bytes));
    half_of(NAN, block);
}

void quantise_q8_0(const float *x, std::byte *block) {
    const Range range = range_of(x);
    const float s = half_of(std::max(std::fabs(range.low), std::fabs(range.high)) / 127, block);
    if (!range.is_finite || !std::isfinite(s)) {
        return put_nan(block, 34);
    }
    float q[kBlock];
    fit(x, s, 0, -127, 127, q);
    for (int i = 0; i < kBlock; ++i) {
        block[2 + i] = std::byte(int8_t(q[i]));
    }
}

// Candidate scales map the largest value to around -8; the one with the smallest error wins.
void quantise_q4_0(const float *x, std::byte *block) {
    constexpr float kSteps[] = {8.0f, 7.0f, 7.5f, 8.5f, 9.0f, 9.5f};
    const Range range = range_of(x);
    const float largest = -range.low > range.high ? range.low : range.high;
    float best = -1; // no error yet
    for (float steps : kSteps) {
        std::byte scale[2];
        float q[kBlock];
        const float s = half_of(-largest / steps, scale);
        if (!range.is_finite || !std::isfinite(s)) {
            return put_nan(block, 18);
        }
        const float error = fit(x, s, 0, -8, 7, q);
        if (best < 0 || error < best) {
            best = error;
            std::memcpy(block, scale, sizeof scale);
            put_nibbles(q, 8, block + 2);
        }
    }
}

// Candidate ranges: that of the block, or narrower ones around the same center.
void quantise_q4_1(const float *x, std::byte *block) {
    constexpr float kShares[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f};
    const Range range = range_of(x);
    const float middle = range.low / 2 + range.high / 2;
    float best = -1; // no error yet
    for (float share : kShares) {
        std::byte scales[4];
        float q[kBlock];
        const float s = half_of(share * (range.high / 15 - range.low / 15), scales);
        const float m = half_of(middle - 7.5f * s, scales + 2);
        if (!range.is_finite || !std::isfinite(s) || !std::isfinite(m)) {
            return put_nan(block, 20);
        }
        const float error = fit(x, s, m, 0, 15, q);
        if (best < 0 || error < best) {
            best = error;
            std::memcpy(block, scales, sizeof scales);
            put_nibbles(q, 0, block + 4);
        }
    }
}

constexpr int kF8Block = 128;
constexpr float kF8Max = 448;

// e4m3 of |x| <= 448, to nearest, ties to even.
uint8_t e4m3_of(float x) {
    const uint32_t bits = bits_of(x);
    const auto sign = uint8_t(bits >> 24 & 0x80u);
    const float magnitude = std::fabs(x);
    if (magnitude < 0x1p-6f) { // subnormal: a multiple of 2^-9
        return uint8_t(sign | int(rounded(magnitude * 512)));
    }
    // To 3 bits of mantissa; the exponent changes its bias from 127 to 7.
    const uint32_t kept = (bits & 0x7fffffffu) + 0x7ffffu + (bits >> 20 & 1);
    return uint8_t(sign | ((kept >> 20) - (120u << 3)));
}

// Row x [k] as blocks of f8_g128 that all have the scale of the row.
void quantise_f8_row(const float *x, int64_t k, std::byte *to) {
    float largest = 0;
    float tainted = 0; // NaN if any value is NaN or infinite
    for (int64_t i = 0; i < k; ++i) {
        largest = std::max(largest, std::fabs(x[i]));
        tainted += x[i] * 0;
    }
    const float s = tainted == 0 ? largest / kF8Max : NAN;
    const float inverse = s > 0 ? 1 / s : 0.0f;
    for (int64_t b = 0; b < k; b += kF8Block, to += 4 + kF8Block) {
        std::memcpy(to, &s, sizeof s);
        for (int i = 0; i < kF8Block; ++i) {
            const float q = x[b + i] * inverse;
            to[4 + i] = std::byte(e4m3_of(q > kF8Max ? kF8Max : q < -kF8Max ? -kF8Max : q));
        }
    }
}

void quantise_f8(const device::Stream &stream, const Tensor &out, const Tensor &in) {
    const int64_t k = in.size(1);
    const int64_t row_bytes = bytes_of(out.dtype(), k);
    cpu::for_rows(stream, in.size(0), 16 * k, [&](int64_t first, int64_t last) {
        std::vector<float> wide(size_t(k), 0.0f);
        for (int64_t i = first; i < last; ++i) {
            const float *x = cpu::read(cpu::kernels(), cpu::row_of(in, i), wide.data(), k);
            quantise_f8_row(x, k, out.data() + i * row_bytes);
        }
    });
}

using QuantiseBlock = void (*)(const float *x, std::byte *block);

QuantiseBlock quantise_block_of(DType dtype) {
    switch (dtype) {
    case LLAISYS_DTYPE_Q8_0:
        return quantise_q8_0;
    case LLAISYS_DTYPE_Q4_0:
        return quantise_q4_0;
    case LLAISYS_DTYPE_Q4_1:
        return quantise_q4_1;
    default:
        fail(LLAISYS_ERROR_INTERNAL, "quantise: no kernel for ", name_of(dtype));
    }
}

} // namespace

void quantise_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in) {
    const DType dtype = out.dtype();
    if (dtype == LLAISYS_DTYPE_F8_G128) {
        return quantise_f8(stream, out, in);
    }
    const QuantiseBlock quantise_block = quantise_block_of(dtype);
    const int64_t k = in.size(1);
    const int64_t row_bytes = bytes_of(dtype, k);
    const int64_t block_bytes = traits_of(dtype).block_bytes;
    const cpu::Kernels &kernels = cpu::kernels();
    cpu::for_rows(stream, in.size(0), 16 * k, [&](int64_t first, int64_t last) {
        float buffer[cpu::kPiece];
        static_assert(cpu::kPiece % kBlock == 0);
        for (int64_t i = first; i < last; ++i) {
            std::byte *to = out.data() + i * row_bytes;
            for (int64_t c = 0; c < k; c += cpu::kPiece) {
                const int64_t n = std::min(cpu::kPiece, k - c);
                const float *x = cpu::read(kernels, cpu::row_of(in, i).from(c), buffer, n);
                for (int64_t b = 0; b < n; b += kBlock, to += block_bytes) {
                    quantise_block(x + b, to);
                }
            }
        }
    });
}

} // namespace llaisys::ops
