#include "ops/linear/quant_blocks.hpp"

#include <cstring>

namespace llaisys::ops {

namespace {

const uint8_t *bytes(const std::byte *p) { return reinterpret_cast<const uint8_t *>(p); }

uint16_t half_at(const std::byte *p) {
    uint16_t bits;
    std::memcpy(&bits, p, sizeof bits);
    return bits;
}

uint16_t negated(uint16_t half) { return half ^ 0x8000u; } // files say s * q + m

// 16 bytes: values 0..15 in the low halves, 16..31 in the high ones.
void read_nibbles(const std::byte *p, uint8_t *q) {
    for (int i = 0; i < 16; ++i) {
        q[i] = bytes(p)[i] & 15;
        q[i + 16] = bytes(p)[i] >> 4;
    }
}

// Bit i of the four bytes at p becomes bit 4 of q[i].
void read_fifth_bits(const std::byte *p, uint8_t *q) {
    uint32_t bits;
    std::memcpy(&bits, p, sizeof bits);
    for (int i = 0; i < 32; ++i) {
        q[i] |= uint8_t((bits >> i & 1) << 4);
    }
}

// Eight scales and mins of 6 bits in 12 bytes.
void read_six_bit_scales(const std::byte *p, QuantBlock *out) {
    const uint8_t *b = bytes(p);
    for (int i = 0; i < 4; ++i) {
        out->scales[i] = b[i] & 63;
        out->mins[i] = b[i + 4] & 63;
        out->scales[i + 4] = uint8_t((b[i + 8] & 15) | (b[i] >> 6) << 4);
        out->mins[i + 4] = uint8_t((b[i + 8] >> 4) | (b[i + 4] >> 6) << 4);
    }
}

// 128 bytes: each 32 of them hold two groups, one in the low halves and one in the high ones.
void read_super_nibbles(const std::byte *p, uint8_t *q) {
    for (int i = 0; i < 128; ++i) {
        const int at = i / 32 * 64 + i % 32;
        q[at] = bytes(p)[i] & 15;
        q[at + 32] = bytes(p)[i] >> 4;
    }
}

void read_q6_k(const std::byte *block, QuantBlock *out) {
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
    std::memcpy(out->scales, block + 192, 16);
    out->d = half_at(block + 208);
}

} // namespace

const cpu::QuantLayout *quant_layout_of(DType dtype) {
    switch (dtype) {
    case LLAISYS_DTYPE_Q8_0:
        return &cpu::kQ8_0;
    case LLAISYS_DTYPE_Q4_0:
        return &cpu::kQ4_0;
    case LLAISYS_DTYPE_Q4_1:
        return &cpu::kQ4_1;
    case LLAISYS_DTYPE_Q5_0:
        return &cpu::kQ5_0;
    case LLAISYS_DTYPE_Q5_1:
        return &cpu::kQ5_1;
    case LLAISYS_DTYPE_Q4_K:
        return &cpu::kQ4_K;
    case LLAISYS_DTYPE_Q5_K:
        return &cpu::kQ5_K;
    case LLAISYS_DTYPE_Q6_K:
        return &cpu::kQ6_K;
    default:
        return nullptr;
    }
}

void read_block(DType dtype, const std::byte *block, QuantBlock *out) {
    out->d = half_at(block);
    switch (dtype) {
    case LLAISYS_DTYPE_Q8_0:
        std::memcpy(out->q, block + 2, 32);
        return;
    case LLAISYS_DTYPE_Q4_0:
        return read_nibbles(block + 2, out->q);
    case LLAISYS_DTYPE_Q4_1:
        out->min = negated(half_at(block + 2));
        return read_nibbles(block + 4, out->q);
    case LLAISYS_DTYPE_Q5_0:
        read_nibbles(block + 6, out->q);
        return read_fifth_bits(block + 2, out->q);
    case LLAISYS_DTYPE_Q5_1:
        out->min = negated(half_at(block + 2));
        read_nibbles(block + 8, out->q);
        return read_fifth_bits(block + 4, out->q);
    case LLAISYS_DTYPE_Q4_K:
        out->min = half_at(block + 2);
        read_six_bit_scales(block + 4, out);
        return read_super_nibbles(block + 16, out->q);
    case LLAISYS_DTYPE_Q5_K:
        out->min = half_at(block + 2);
        read_six_bit_scales(block + 4, out);
        read_super_nibbles(block + 48, out->q);
        for (int i = 0; i < 256; ++i) { // bit g of byte i belongs to value i of group g
            out->q[i] |= uint8_t((bytes(block)[16 + i % 32] >> (i / 32) & 1) << 4);
        }
        return;
    case LLAISYS_DTYPE_Q6_K:
        return read_q6_k(block, out);
    default:
        fail(LLAISYS_ERROR_INVALID, "dtype must be quantised, got ", name_of(dtype));
    }
}

} // namespace llaisys::ops
