#include "ops/linear/cpu.hpp"

#include "ops/cpu/quant_kernels.hpp"
#include "ops/cpu/rows.hpp"
#include "ops/linear/quant_block.hpp"

#include <cstring>

namespace llaisys::ops {

namespace {

using cpu::kQuantGroup;
using cpu::kQuantPanel;
using cpu::QuantLayout;

// Index of byte i of quad c of output j in a part of q.
constexpr int64_t byte_at(int64_t c, int64_t j, int64_t i) { return (c * kQuantPanel + j) * 4 + i; }

void put_half(std::byte *base, int64_t j, uint16_t bits) {
    std::memcpy(base + 2 * j, &bits, sizeof bits);
}

// Four values at q, one per byte.
uint32_t load_quad(const uint8_t *q) {
    uint32_t quad;
    std::memcpy(&quad, q, sizeof quad);
    return quad;
}

// Store the 32 values at q of output j in the q part of a group, four at a time.
void put_values(const QuantLayout &layout, int byte_offset, const uint8_t *q, int64_t j,
                std::byte *part) {
    const auto store = [&](int64_t at, uint32_t quad) {
        std::memcpy(part + at, &quad, sizeof quad);
    };
    if (layout.bits == 8) {
        for (int64_t k = 0; k < kQuantGroup; ++k) {
            part[byte_at(k / 4, j, k % 4)] = std::byte(q[k] + byte_offset);
        }
        return;
    }
    for (int64_t c = 0; c < 4; ++c) {
        const uint32_t low = load_quad(q + 4 * c) & 0x0f0f0f0fu;
        const uint32_t high = load_quad(q + 4 * c + 16) & 0x0f0f0f0fu;
        store(byte_at(c, j, 0), low | high << 4);
    }
    if (layout.bits == 5) {
        uint32_t fifth = 0;
        for (int64_t c = 0; c < 8; ++c) {
            fifth |= (load_quad(q + 4 * c) >> 4 & 0x01010101u) << c;
        }
        store(512 + byte_at(0, j, 0), fifth);
    } else if (layout.bits == 6) {
        for (int64_t half = 0; half < 2; ++half) {
            uint32_t top = 0;
            for (int64_t c = 0; c < 4; ++c) {
                top |= (load_quad(q + 16 * half + 4 * c) >> 4 & 0x03030303u) << (2 * c);
            }
            store(512 + 128 * half + byte_at(0, j, 0), top);
        }
    }
}

uint8_t get_value(const QuantLayout &layout, int byte_offset, const std::byte *part, int64_t k,
                  int64_t j) {
    const auto *from = reinterpret_cast<const uint8_t *>(part);
    const int64_t c = k / 4;
    const int64_t i = k % 4;
    if (layout.bits == 8) {
        return uint8_t(from[byte_at(c, j, i)] - byte_offset);
    }
    int value = from[byte_at(c % 4, j, i)] >> (c < 4 ? 0 : 4) & 15;
    if (layout.bits == 5) {
        value |= (from[512 + byte_at(0, j, i)] >> c & 1) << 4;
    } else if (layout.bits == 6) {
        value |= (from[512 + 128 * (c / 4) + byte_at(0, j, i)] >> (2 * (c % 4)) & 3) << 4;
    }
    return uint8_t(value);
}

// Pack the blocks of one row as column j of a panel.
void pack_row(DType dtype, const QuantLayout &layout, int byte_offset, const std::byte *row,
              int64_t k, int64_t j, std::byte *panel) {
    const int64_t groups_of_block = layout.record_k() / kQuantGroup;
    const int64_t block_bytes = traits_of(dtype).block_bytes;
    std::byte *group = panel + layout.front_bytes(k);
    QuantBlock block{};
    for (int64_t b = 0; b < k / layout.record_k(); ++b, row += block_bytes) {
        try_read_block(dtype, row, &block); // quantised: it has a layout
        std::byte *front = layout.super_bytes() != 0 ? panel + b * layout.super_bytes() : group;
        if (layout.grouped != 0) {
            std::memcpy(front + 4 * j, &block.s, sizeof block.s);
            put_half(front + 4 * kQuantPanel, j, block.min);
        } else {
            put_half(front, j, block.d);
            if (layout.has_min) {
                put_half(front + 2 * kQuantPanel, j, block.min);
            }
        }
        for (int64_t g = 0; g < groups_of_block; ++g, group += layout.group_bytes()) {
            if (layout.is_super && layout.is_split) {
                group[j] = std::byte(block.scales[2 * g]);
                group[kQuantPanel + j] = std::byte(block.scales[2 * g + 1]);
                if (layout.has_min) {
                    group[2 * kQuantPanel + j] = std::byte(block.mins[2 * g]);
                    group[3 * kQuantPanel + j] = std::byte(block.mins[2 * g + 1]);
                }
            } else if (layout.is_super) {
                group[j] = std::byte(block.scales[g]);
                group[kQuantPanel + j] = std::byte(block.mins[g]);
            }
            put_values(layout, byte_offset, block.q + g * kQuantGroup, j,
                       group + layout.group_header());
        }
    }
}

float half_value(const std::byte *base, int64_t j) {
    f16_t half;
    std::memcpy(&half, base + 2 * j, sizeof half);
    return to_f32(half);
}

// Scale and offset of q in a group of 32; in a grouped format the offset is subtracted before
// scaling.
struct ScaleAndMin {
    float s;
    float m;
};

// For output j; half: 0 or 1, which may differ in a split layout.
ScaleAndMin scale_and_min(const QuantLayout &layout, const std::byte *front, const std::byte *group,
                          int64_t half, int64_t j) {
    if (layout.grouped != 0) {
        float s;
        std::memcpy(&s, front + 4 * j, sizeof s);
        return {s, half_value(front + 4 * kQuantPanel, j)};
    }
    const float d = half_value(front, j);
    const float min = layout.has_min ? half_value(front + 2 * kQuantPanel, j) : 0.0f;
    if (!layout.is_super) {
        return {d, min};
    }
    if (!layout.is_split) {
        return {d * float(group[j]), min * float(group[kQuantPanel + j])};
    }
    const float m = layout.has_min ? min * float(group[(2 + half) * kQuantPanel + j]) : 0.0f;
    return {d * float(int8_t(group[half * kQuantPanel + j])), m};
}

// Row `row` of the weight as f32 [in_features].
void read_row(const LinearWeight &weight, int64_t row, float *out) {
    const QuantLayout &layout = cpu::quant_layout_of(weight.format->dtype);
    const int64_t k = weight.in_features;
    const int byte_offset = cpu::quant_kernels().byte_offset;
    const int64_t j = row % kQuantPanel;
    const std::byte *panel = weight.bytes.data() + row / kQuantPanel * layout.panel_bytes(k);
    const std::byte *group = panel + layout.front_bytes(k);
    for (int64_t at = 0; at < k; at += kQuantGroup, group += layout.group_bytes()) {
        const std::byte *front = layout.super_bytes() != 0
                                     ? panel + at / layout.record_k() * layout.super_bytes()
                                     : group;
        for (int64_t i = 0; i < kQuantGroup; ++i) {
            const auto [s, m] = scale_and_min(layout, front, group, i / 16, j);
            const uint8_t raw = get_value(layout, byte_offset, group + layout.group_header(), i, j);
            const float q = float(layout.bits == 8 ? int(int8_t(raw)) : int(raw) - layout.zero);
            out[at + i] = layout.grouped != 0 ? s * (q - m) : layout.has_min ? s * q - m : s * q;
        }
    }
}

} // namespace

void pack_quantised(const device::Stream &stream, const Tensor &weight, LinearWeight *packed) {
    const QuantLayout &layout = cpu::quant_layout_of(weight.dtype());
    const int64_t n = weight.size(0);
    const int64_t k = weight.size(1);
    require(k % layout.record_k() == 0, "a weight in ", name_of(weight.dtype()),
            " must have a multiple of ", layout.record_k(), " columns, got ", k);
    if (weight.dtype() == LLAISYS_DTYPE_I8_CHANNEL) {
        check_channel_scales(stream, weight);
    }
    const int64_t panels = (n + kQuantPanel - 1) / kQuantPanel;
    const int64_t panel_bytes = layout.panel_bytes(k);
    const int64_t row_bytes = bytes_of(weight.dtype(), k);
    const int byte_offset = cpu::quant_kernels().byte_offset;
    packed->bytes = Tensor::create({panels, panel_bytes}, LLAISYS_DTYPE_U8);
    std::byte *bytes = packed->bytes.data();
    cpu::for_rows(stream, panels, kQuantPanel * k, [&](int64_t first, int64_t last) {
        for (int64_t row = first * kQuantPanel; row < std::min(n, last * kQuantPanel); ++row) {
            pack_row(weight.dtype(), layout, byte_offset, weight.data() + row * row_bytes, k,
                     row % kQuantPanel, bytes + row / kQuantPanel * panel_bytes);
        }
    });
}

void rows_of_quantised(const device::Stream &stream, const Tensor &out, const Tensor &index,
                       const LinearWeight &weight) {
    static thread_local cpu::Scratch scratch;
    const int64_t k = weight.in_features;
    float *wide = scratch.floats(out.size(0) * k);
    cpu::for_rows(stream, out.size(0), 4 * k, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            float *values = cpu::target(cpu::row_of(out, i), wide + i * k);
            read_row(weight, index.as<int64_t>()[i], values);
            cpu::finish(cpu::kernels(), cpu::row_of(out, i), values, k);
        }
    });
}

} // namespace llaisys::ops
