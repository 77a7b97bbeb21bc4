// A block of a quantised panel, up to 20 groups of 32 values of k: its q, packed or unpacked into
// bytes, and its scales as f32. Compiled per instruction set for bytes; included after
// simd_<isa>.hpp and bytes_<isa>.hpp.
#pragma once

#include "device/cpu/simd.hpp"
#include "ops/cpu/quant_kernels.hpp"
#include "ops/cpu/row_kernels.hpp"

#include <type_traits>

namespace llaisys::LLAISYS_CPU_NS {

using ops::cpu::kQuantGroup;
using ops::cpu::kQuantPanel;
using ops::cpu::QuantGroup;
using ops::cpu::QuantLayout;
using ops::cpu::QuantRows;
using ops::cpu::QuantTask;

// Format parameter of the kernels: an index of kQuantFormats. Unnamed namespace: their instances stay
// local to the file, and the compiler inlines those with one caller.
namespace {
template <size_t format> struct LayoutFormat {
    static constexpr size_t index = format;
    static constexpr QuantLayout layout = ops::cpu::kQuantFormats[format].layout;
};
} // namespace

constexpr int kBlockGroups = 20;
constexpr int64_t kGroupBytes = 1024; // of unpacked q
constexpr int kPanelVectors = int(kQuantPanel) / kLanes;

struct BytePair {
    vb low, high; // quads c and c + 4
};

// Whether products of weights below 128 are summed in 16 bits first.
constexpr bool kWordSums = !std::is_same_v<vw, vi>;

// The q of consecutive groups of a panel, `stride` bytes apart. They are below 2^value_bits, or signed.
template <int bits, int value_bits = bits> struct PackedGroups {
    static constexpr bool is_signed = value_bits == 8 && !kUnsignedWeights;
    static constexpr int kValueBits = value_bits;
    const std::byte *q;
    int64_t stride;

    template <int c> BytePair pair(int64_t group, int vector) const {
        const std::byte *base = q + group * stride + vector * kLanes * 4;
        if constexpr (bits == 8) {
            return {load_bytes(base + c * 128), load_bytes(base + (c + 4) * 128)};
        }
        const vb both = load_bytes(base + c * 128);
        BytePair pair = {low_nibbles(both), high_nibbles(both)};
        if constexpr (bits == 5) {
            const vb plane = load_bytes(base + 512);
            pair = {with_bits<4 - c, 16>(pair.low, plane), with_bits<-c, 16>(pair.high, plane)};
        } else if constexpr (bits == 6) {
            pair = {with_bits<4 - 2 * c, 48>(pair.low, load_bytes(base + 512)),
                    with_bits<4 - 2 * c, 48>(pair.high, load_bytes(base + 640))};
        }
        return pair;
    }
};

// Scales and minimums of a block, [groups, 32] each (split: [groups, 2, 32]).
struct BlockScales {
    alignas(64) float s[kBlockGroups * 2 * kQuantPanel];
    alignas(64) float m[kBlockGroups * 2 * kQuantPanel];
};

template <int c, int zero, typename Groups>
inline void unpack_pair(std::byte *out, const Groups &groups, int64_t group, int vector) {
    BytePair pair = groups.template pair<c>(group, vector);
    if constexpr (zero != 0) {
        pair = {sub_bytes<zero>(pair.low), sub_bytes<zero>(pair.high)};
    }
    store_bytes(out + c * 128 + vector * kLanes * 4, pair.low);
    store_bytes(out + (c + 4) * 128 + vector * kLanes * 4, pair.high);
}

// The q of n groups as bytes, less `zero`.
template <int zero, typename Groups>
void unpack_groups(std::byte *out, const Groups &groups, int64_t n_groups) {
    for (int64_t g = 0; g < n_groups; ++g, out += kGroupBytes) {
        for (int v = 0; v < kPanelVectors; ++v) {
            unpack_pair<0, zero>(out, groups, g, v);
            unpack_pair<1, zero>(out, groups, g, v);
            unpack_pair<2, zero>(out, groups, g, v);
            unpack_pair<3, zero>(out, groups, g, v);
        }
    }
}

// Scales and minimums of the groups [group, group + n) of a panel whose headers begin at `header`.
template <typename Format>
void read_scales(const std::byte *panel, const std::byte *header, int64_t group, int64_t n,
                 BlockScales *scales) {
    constexpr QuantLayout layout = Format::layout;
    constexpr int64_t kParts = layout.is_split ? 2 : 1;
    alignas(64) float d[2 * kQuantPanel]; // of a super format: d, dmin
    for (int64_t g = 0; g < n; ++g, header += layout.group_bytes()) {
        float *s = scales->s + g * kParts * kQuantPanel;
        float *m = scales->m + g * kParts * kQuantPanel;
        if constexpr (layout.grouped != 0) {
            constexpr int64_t kGroups = layout.grouped / kQuantGroup; // groups that share s and z
            const std::byte *front = panel + (group + g) / kGroups * layout.super_bytes();
            const float *wide = reinterpret_cast<const float *>(front);
            convert_row(m, reinterpret_cast<const f16_t *>(wide + kQuantPanel), kQuantPanel);
            for (int64_t j = 0; j < kQuantPanel; j += kLanes) {
                const vf scale = load(wide + j);
                store(s + j, scale);
                store(m + j, mul(scale, load(m + j)));
            }
            continue;
        } else if constexpr (!layout.is_super) {
            const f16_t *plain = reinterpret_cast<const f16_t *>(header);
            convert_row(s, plain, kQuantPanel);
            if constexpr (layout.has_min) {
                convert_row(m, plain + kQuantPanel, kQuantPanel);
            }
            continue;
        }
        if (g == 0 || (group + g) % 8 == 0) {
            const std::byte *front = panel + (group + g) / 8 * layout.super_bytes();
            convert_row(d, reinterpret_cast<const f16_t *>(front), layout.super_bytes() / 2);
        }
        for (int64_t j = 0; j < kQuantPanel; j += kLanes) {
            if constexpr (layout.is_split) {
                store(s + j, mul(load(d + j), load_i8(header + j)));
                store(s + kQuantPanel + j, mul(load(d + j), load_i8(header + kQuantPanel + j)));
                if constexpr (layout.has_min) {
                    const vf dmin = load(d + kQuantPanel + j);
                    store(m + j, mul(dmin, load_u8(header + 2 * kQuantPanel + j)));
                    store(m + kQuantPanel + j, mul(dmin, load_u8(header + 3 * kQuantPanel + j)));
                }
            } else {
                store(s + j, mul(load(d + j), load_u8(header + j)));
                store(m + j, mul(load(d + kQuantPanel + j), load_u8(header + kQuantPanel + j)));
            }
        }
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
