// Reads the blocks of quantised tensors, in the layout of llaisys/types.h, row by row (ops/quantise
// writes some of them). Compiled for the host and for CUDA kernels.
#pragma once

#include "base/dtype.hpp"
#include "base/host_device.hpp"

namespace llaisys::ops {

// One unpacked block: value i is s * (q[i] - zero), or s * q[i] - m, with s and m as defined in
// quant_panels.hpp for the layout of the format.
struct QuantBlock {
    uint8_t q[256];     // 8-bit layouts: the bits of the signed value; f8: e4m3
    uint16_t d;         // f16 bits: s of a plain format, d of a super one
    uint16_t min;       // f16 bits: m of a plain format, dmin of a super one, z of a grouped one
    float s;            // of a grouped format, i8_channel and f8
    uint8_t scales[16]; // super formats: of each group of 16 or 32 values
    uint8_t mins[16];
};

namespace blocks {

LLAISYS_HOST_DEVICE inline const uint8_t *bytes(const std::byte *p) {
    return reinterpret_cast<const uint8_t *>(p);
}

LLAISYS_HOST_DEVICE inline uint16_t half_at(const std::byte *p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return bits;
}

LLAISYS_HOST_DEVICE inline uint16_t negated(uint16_t half) {
    return half ^ 0x8000u;
} // files store s * q + m

// 16 bytes: values 0..15 in the low nibbles, 16..31 in the high ones.
LLAISYS_HOST_DEVICE inline void read_nibbles(const std::byte *p, uint8_t *q) {
    for (int i = 0; i < 16; ++i) {
        q[i] = bytes(p)[i] & 15;
        q[i + 16] = bytes(p)[i] >> 4;
    }
}

// Bit i of the four bytes at p becomes bit 4 of q[i].
LLAISYS_HOST_DEVICE inline void read_fifth_bits(const std::byte *p, uint8_t *q) {
    uint32_t bits;
    memcpy(&bits, p, sizeof bits);
    for (int i = 0; i < 32; ++i) {
        q[i] |= uint8_t((bits >> i & 1) << 4);
    }
}

// Eight scales and minimums of 6 bits in 12 bytes.
LLAISYS_HOST_DEVICE inline void read_six_bit_scales(const std::byte *p, QuantBlock *out) {
    const uint8_t *b = bytes(p);
    for (int i = 0; i < 4; ++i) {
        out->scales[i] = b[i] & 63;
        out->mins[i] = b[i + 4] & 63;
        out->scales[i + 4] = uint8_t((b[i + 8] & 15) | (b[i] >> 6) << 4);
        out->mins[i + 4] = uint8_t((b[i + 8] >> 4) | (b[i + 4] >> 6) << 4);
    }
}

// 128 bytes: each 32 bytes hold two groups, one in the low nibbles and one in the high ones.
LLAISYS_HOST_DEVICE inline void read_super_nibbles(const std::byte *p, uint8_t *q) {
    for (int i = 0; i < 128; ++i) {
        const int at = i / 32 * 64 + i % 32;
        q[at] = bytes(p)[i] & 15;
        q[at + 32] = bytes(p)[i] >> 4;
    }
}

LLAISYS_HOST_DEVICE inline void read_q6_k(const std::byte *block, QuantBlock *out) {
    const uint8_t *low = bytes(block);
    const uint8_t *high = low + 128;
    for (int half = 0; half < 2; ++half, low += 64, high += 32) {
        uint8_t *q = out->q + 128 * half;
        for (int i = 0; i < 32; ++i) {
            q[i] = uint8_t((low[i] & 15) | (high[i] & 3) << 4);
            q[i + 32] = uint8_t((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
            q[i + 64] = uint8_t((low[i] >> 4) | (high[i] >> 4 & 3) << 4);
            q[i + 96] = uint8_t((low[i + 32] >> 4) | (high[i] >> 6) << 4);
        }
    }
    memcpy(out->scales, block + 192, 16);
    out->d = half_at(block + 208);
}

// Two bits per value: each half of the block has 32 bytes, and bits 2p and 2p + 1 of byte i are
// those of value 32p + i of the half.
LLAISYS_HOST_DEVICE inline void read_two_bits(const std::byte *p, uint8_t *q) {
    for (int i = 0; i < 256; ++i) {
        q[i] = bytes(p)[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    }
}

// 16 scales and minimums of 4 bits, the values, d, dmin.
LLAISYS_HOST_DEVICE inline void read_q2_k(const std::byte *block, QuantBlock *out) {
    for (int i = 0; i < 16; ++i) {
        out->scales[i] = bytes(block)[i] & 15;
        out->mins[i] = bytes(block)[i] >> 4;
    }
    read_two_bits(block + 16, out->q);
    out->d = half_at(block + 80);
    out->min = half_at(block + 82);
}

// The third bits of the values, their other two, 16 scales of 6 bits with zero point 32, d. Byte i
// of the scales has the low nibbles of scales i and i + 8 (i < 8); bits 2p and 2p + 1 of byte 8 + i
// (i < 4) are the high bits of scale 4p + i.
LLAISYS_HOST_DEVICE inline void read_q3_k(const std::byte *block, QuantBlock *out) {
    read_two_bits(block + 32, out->q);
    for (int i = 0; i < 256; ++i) {
        out->q[i] |= uint8_t((bytes(block)[i % 32] >> (i / 32) & 1) << 2);
    }
    const uint8_t *scales = bytes(block) + 96;
    for (int i = 0; i < 16; ++i) {
        const int low = scales[i % 8] >> (i / 8 * 4) & 15;
        const int high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
        out->scales[i] = uint8_t((low | high << 4) - 32);
    }
    out->d = half_at(block + 108);
}

// Value of an iq4_nl code.
LLAISYS_HOST_DEVICE inline uint8_t uneven_step(uint8_t code) {
    constexpr int8_t kSteps[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
    return uint8_t(kSteps[code]);
}

LLAISYS_HOST_DEVICE inline void read_scale_and_zero(const std::byte *block, QuantBlock *out) {
    memcpy(&out->s, block, sizeof out->s);
    out->min = half_at(block + 4);
}

} // namespace blocks

// Unpack the block at `block`; false for a dtype that is not quantised.
LLAISYS_HOST_DEVICE inline bool try_read_block(DType dtype, const std::byte *block,
                                               QuantBlock *out) {
    using namespace blocks;
    const int elements =
        dtype == LLAISYS_DTYPE_I4_G32 || dtype == LLAISYS_DTYPE_I8_G32 ? 32 : 128; // grouped ones
    out->d = half_at(block);
    switch (dtype) {
    case LLAISYS_DTYPE_Q8_0:
        memcpy(out->q, block + 2, 32);
        return true;
    case LLAISYS_DTYPE_Q4_0:
        read_nibbles(block + 2, out->q);
        return true;
    case LLAISYS_DTYPE_Q4_1:
        out->min = negated(half_at(block + 2));
        read_nibbles(block + 4, out->q);
        return true;
    case LLAISYS_DTYPE_Q5_0:
        read_nibbles(block + 6, out->q);
        read_fifth_bits(block + 2, out->q);
        return true;
    case LLAISYS_DTYPE_Q5_1:
        out->min = negated(half_at(block + 2));
        read_nibbles(block + 8, out->q);
        read_fifth_bits(block + 4, out->q);
        return true;
    case LLAISYS_DTYPE_Q4_K:
        out->min = half_at(block + 2);
        read_six_bit_scales(block + 4, out);
        read_super_nibbles(block + 16, out->q);
        return true;
    case LLAISYS_DTYPE_Q5_K:
        out->min = half_at(block + 2);
        read_six_bit_scales(block + 4, out);
        read_super_nibbles(block + 48, out->q);
        for (int i = 0; i < 256; ++i) { // bit g of byte i belongs to value i of group g
            out->q[i] |= uint8_t((bytes(block)[16 + i % 32] >> (i / 32) & 1) << 4);
        }
        return true;
    case LLAISYS_DTYPE_Q6_K:
        read_q6_k(block, out);
        return true;
    case LLAISYS_DTYPE_Q2_K:
        read_q2_k(block, out);
        return true;
    case LLAISYS_DTYPE_Q3_K:
        read_q3_k(block, out);
        return true;
    case LLAISYS_DTYPE_IQ4_NL:
        read_nibbles(block + 2, out->q);
        for (int i = 0; i < 32; ++i) {
            out->q[i] = uneven_step(out->q[i]);
        }
        return true;
    case LLAISYS_DTYPE_I4_G32:
    case LLAISYS_DTYPE_I4_G128:
        read_scale_and_zero(block, out);
        for (int i = 0; i < elements; ++i) {
            out->q[i] = bytes(block)[6 + i / 2] >> (i % 2 * 4) & 15;
        }
        return true;
    case LLAISYS_DTYPE_I8_G32:
    case LLAISYS_DTYPE_I8_G128:
        read_scale_and_zero(block, out);
        memcpy(out->q, block + 6, size_t(elements));
        return true;
    case LLAISYS_DTYPE_I8_CHANNEL:
        memcpy(&out->s, block, sizeof out->s);
        out->min = 0;
        memcpy(out->q, block + 4, 32);
        return true;
    case LLAISYS_DTYPE_F8_G128:
        memcpy(&out->s, block, sizeof out->s);
        memcpy(out->q, block + 4, 128);
        return true;
    default:
        return false;
    }
}

} // namespace llaisys::ops
