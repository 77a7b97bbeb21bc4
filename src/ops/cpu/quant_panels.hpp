// Quantised weights in memory: panels of 32 outputs, like the plain ones, laid out for byte
// products.
//
// A weight is s * (q - zero) or s * q - m, where q has 4, 5, 6 or 8 bits and s and m belong to one
// output and one group of 16 or 32 values along k. A panel is a row of groups of 32 values of k:
//
//   plain formats:  per group s f16[32], (m f16[32]), q
//   super formats:  per 256 values of k d f16[32], (dmin f16[32]), all at the front of the panel; per
//                   group scale 8 bit [32], (min u8[32]), q; with groups of 16 scale and min twice
//                   with s = d * scale and m = dmin * min, both rounded once to f32
//   grouped ones:   per 32 or 128 values of k s f32[32], z f16[32], all at the front of the panel; per
//                   group q; with m = s * z
//
// q of 32 values of k and 32 outputs: one lane of a byte product takes a "quad", four values along
// k; quad c of output j is the four bytes (c * 32 + j) * 4 of a part.
//
//   8 bits:  quads 0..7, 1024 bytes, signed or unsigned as the kernels require
//   4 bits:  512 bytes, quad c in the low halves and quad c + 4 in the high halves
//   5 bits:  as 4 bits, then 128 bytes: bit c of byte j * 4 + i is the high bit of quad c
//   6 bits:  as 4 bits, then 2 x 128 bytes: bits 2c and 2c + 1 of byte j * 4 + i of plane p are the
//            high bits of quad 4p + c
#pragma once

#include "base/dtype.hpp"

#include <cstddef>
#include <cstdint>

namespace llaisys::ops::cpu {

constexpr int64_t kQuantPanel = 32; // outputs
constexpr int64_t kQuantGroup = 32; // values of k that share the scale of an activation

// Memory layout of one format; the kernels are compiled for each.
struct QuantLayout {
    int bits;      // of q: 4, 5, 6 or 8
    bool is_super; // scales of two levels
    bool has_min;  // s * q - m; otherwise s * (q - zero)
    bool is_split; // groups of 16 values: two scales (and mins) in every 32
    int zero;      // zero point of q
    int grouped;   // values of k per s and z at the front: 32 or 128; 0: not a grouped format

    constexpr int64_t record_k() const { // k is a multiple of it
        return grouped != 0 ? grouped : is_super ? 256 : 32;
    }
    constexpr int64_t q_bytes() const { // of 32 values of k and 32 outputs
        return bits == 8 ? 1024 : 512 + 128 * (bits - 4);
    }
    // Bytes before q in every group.
    constexpr int64_t group_header() const {
        return grouped != 0 ? 0
               : is_super   ? 32 * (is_split ? 2 : 1) * (has_min ? 2 : 1)
                            : 64 * (has_min ? 2 : 1);
    }
    constexpr int64_t group_bytes() const { return group_header() + q_bytes(); }
    // Bytes at the front of the panel per record_k values of k.
    constexpr int64_t super_bytes() const {
        return grouped != 0 ? 192 : is_super ? 64 * (has_min ? 2 : 1) : 0;
    }
    constexpr int64_t front_bytes(int64_t k) const { return k / record_k() * super_bytes(); }
    constexpr int64_t panel_bytes(int64_t k) const {
        return front_bytes(k) + k / kQuantGroup * group_bytes();
    }
};

struct QuantFormat {
    DType dtype;
    QuantLayout layout;
};
constexpr QuantFormat kQuantFormats[] = {
    {LLAISYS_DTYPE_Q8_0, {8, false, false, false, 0, 0}}, // iq4_nl too: its values are bytes
    {LLAISYS_DTYPE_Q4_0, {4, false, false, false, 8, 0}},
    {LLAISYS_DTYPE_Q4_1, {4, false, true, false, 0, 0}},
    {LLAISYS_DTYPE_Q5_0, {5, false, false, false, 16, 0}},
    {LLAISYS_DTYPE_Q5_1, {5, false, true, false, 0, 0}},
    {LLAISYS_DTYPE_Q4_K, {4, true, true, false, 0, 0}},
    {LLAISYS_DTYPE_Q5_K, {5, true, true, false, 0, 0}},
    {LLAISYS_DTYPE_Q6_K, {6, true, false, true, 32, 0}},
    {LLAISYS_DTYPE_Q2_K, {4, true, true, true, 0, 0}}, // two of the four bits are used
    {LLAISYS_DTYPE_Q3_K, {4, true, false, true, 4, 0}},
    {LLAISYS_DTYPE_I4_G32, {4, false, true, false, 0, 32}},
    {LLAISYS_DTYPE_I4_G128, {4, false, true, false, 0, 128}},
    {LLAISYS_DTYPE_I8_G32, {8, false, true, false, 0, 32}}, // and i8_channel without strips
    {LLAISYS_DTYPE_I8_G128, {8, false, true, false, 0, 128}},
};
constexpr size_t kQuantFormatCount = sizeof kQuantFormats / sizeof *kQuantFormats;

// Index of the format of a dtype; throws for a dtype that is not quantised.
constexpr size_t quant_format_of(DType dtype) {
    const DType stored = dtype == LLAISYS_DTYPE_IQ4_NL       ? LLAISYS_DTYPE_Q8_0
                         : dtype == LLAISYS_DTYPE_I8_CHANNEL ? LLAISYS_DTYPE_I8_G32
                                                             : dtype;
    for (size_t i = 0; i < kQuantFormatCount; ++i) {
        if (kQuantFormats[i].dtype == stored) {
            return i;
        }
    }
    fail(LLAISYS_ERROR_INVALID, "dtype must be quantised, got ", name_of(dtype));
}

inline const QuantLayout &quant_layout_of(DType dtype) {
    return kQuantFormats[quant_format_of(dtype)].layout;
}

} // namespace llaisys::ops::cpu
