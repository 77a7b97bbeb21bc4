// The product over quantised panels, compiled per instruction set for bytes; included after
// simd_<isa>.hpp and bytes_<isa>.hpp.
//
// Limit: bytes of the packed weights for one row, byte products for many. A block of up to 16
// groups (512 values of k) of a panel is taken at a time: its scales become f32 once, with many rows
// its q become bytes once, and then register tiles of rows x outputs run over it.
#pragma once

#include "device/cpu/simd.hpp"
#include "ops/cpu/linear_kernel.hpp"
#include "ops/cpu/quant_kernels.hpp"

namespace llaisys::LLAISYS_CPU_NS {

using ops::cpu::kQuantGroup;
using ops::cpu::kQuantPanel;
using ops::cpu::QuantGroup;
using ops::cpu::QuantLayout;
using ops::cpu::QuantRows;
using ops::cpu::QuantTask;

constexpr int kBlockGroups = 16;
constexpr int64_t kGroupBytes = 1024; // of unpacked q
constexpr int kPanelVectors = int(kQuantPanel) / kLanes;

struct BytePair {
    vb low, high; // quads c and c + 4
};

// The q of consecutive groups of a panel, `stride` bytes apart.
template <int bits> struct PackedGroups {
    static constexpr bool is_signed = bits == 8 && !kUnsignedWeights;
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

// What a tile needs of a block: scales and mins, [groups, 32] each (split: [groups, 2, 32]).
struct BlockScales {
    alignas(64) float s[kBlockGroups * 2 * kQuantPanel];
    alignas(64) float m[kBlockGroups * 2 * kQuantPanel];
};

// Sums of byte products of one group: low for its first 16 values of k, high for the others where
// they have a scale of their own.
template <int rows, int vectors, bool is_split> struct GroupSums {
    vi low[rows][vectors];
    vi high[is_split ? rows : 1][is_split ? vectors : 1];
};

// The same with the weights of all vectors at hand: row after row, so that an x is broadcast once and
// as many sums as there are lie between two uses of one.
template <int c, int rows, int vectors, bool is_split, typename Groups>
inline __attribute__((always_inline)) void
quant_step_by_rows(GroupSums<rows, vectors, is_split> &sums, const ByteGroup (&x)[rows],
                   const Groups &groups, int64_t group, int vector) {
    BytePair w[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
        w[v] = groups.template pair<c>(group, vector + v);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            sums.low[r][v] = dot<c, Groups::is_signed>(sums.low[r][v], w[v].low, x[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            vi &sum = is_split ? sums.high[is_split ? r : 0][is_split ? v : 0] : sums.low[r][v];
            sum = dot<c + 4, Groups::is_signed>(sum, w[v].high, x[r]);
        }
    }
}

// The quads c and c + 4 of a group.
template <int c, int rows, int vectors, bool is_split, typename Groups>
inline __attribute__((always_inline)) void
quant_step(GroupSums<rows, vectors, is_split> &sums, const ByteGroup (&x)[rows],
           const Groups &groups, int64_t group, int vector) {
    if constexpr (kRowsFirst) {
        return quant_step_by_rows<c>(sums, x, groups, group, vector);
    }
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
        const BytePair w = groups.template pair<c>(group, vector + v);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            sums.low[r][v] = dot<c, Groups::is_signed>(sums.low[r][v], w.low, x[r]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            if constexpr (is_split) {
                sums.high[r][v] = dot<c + 4, Groups::is_signed>(sums.high[r][v], w.high, x[r]);
            } else {
                sums.low[r][v] = dot<c + 4, Groups::is_signed>(sums.low[r][v], w.high, x[r]);
            }
        }
    }
    // Step by step: left alone, the compiler takes row after row, each a chain that waits for itself.
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            hold(sums.low[r][v]);
        }
    }
}

// acc [rows, 32], columns from `vector` on += the block, for `rows` rows from `row` on. `group` is
// the number of the block's first group in a row of x.
template <int rows, int vectors, int zero_point, bool is_split, bool has_min, typename Groups>
void quant_tile(const QuantRows &x, int64_t row, int64_t group, int64_t n_groups,
                const Groups &groups, int vector, const BlockScales &scales, float *acc,
                FarFetch fetch) {
    constexpr int64_t kParts = is_split ? 2 : 1;
    vf total[rows][vectors];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            total[r][v] = load(acc + r * kQuantPanel + (vector + v) * kLanes);
        }
    }
    const int8_t *q = x.q + (group * x.stride + row) * kQuantGroup;
    const QuantGroup *about = x.groups + group * x.stride + row;
    const float *s = scales.s + vector * kLanes;
    const float *m = scales.m + vector * kLanes;
    for (int64_t g = 0; g < n_groups; ++g) {
        fetch.step();
        GroupSums<rows, vectors, is_split> sums;
        ByteGroup xg[rows];
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            xg[r] = load_group(q + r * kQuantGroup);
            vi low = start_sum(0);
            vi high = start_sum(0);
            if constexpr (zero_point != 0 && is_split) {
                low = start_sum_less<zero_point>(broadcast_int(&about[r].first));
                high = start_sum_less<zero_point>(broadcast_int(&about[r].rest));
            } else if constexpr (zero_point != 0) {
                low = start_sum_less<zero_point>(broadcast_int(&about[r].total));
            }
#pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v) {
                sums.low[r][v] = low;
                if constexpr (is_split) {
                    sums.high[r][v] = high;
                }
            }
        }
        quant_step<0>(sums, xg, groups, g, vector);
        quant_step<1>(sums, xg, groups, g, vector);
        quant_step<2>(sums, xg, groups, g, vector);
        quant_step<3>(sums, xg, groups, g, vector);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            const vf scale = load(s + v * kLanes);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                vf weighted = mul(sum_of(sums.low[r][v]), scale);
                if constexpr (is_split) {
                    const vf second = load(s + kQuantPanel + v * kLanes);
                    weighted = fma(sum_of(sums.high[r][v]), second, weighted);
                }
                if constexpr (has_min && is_split) {
                    const vf first = set1(-float(about[r].first));
                    const vf rest = set1(-float(about[r].rest));
                    weighted = fma(load(m + v * kLanes), first, weighted);
                    weighted = fma(load(m + kQuantPanel + v * kLanes), rest, weighted);
                } else if constexpr (has_min) {
                    const vf minus = set1(about[r].minus);
                    weighted = fma(load(m + v * kLanes), minus, weighted);
                }
                total[r][v] = fma(weighted, set1(about[r].scale), total[r][v]);
            }
        }
        q += x.stride * kQuantGroup;
        about += x.stride;
        s += kParts * kQuantPanel;
        m += kParts * kQuantPanel;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            store(acc + r * kQuantPanel + (vector + v) * kLanes, total[r][v]);
        }
    }
}

template <typename Format> constexpr int vectors_of(int rows) {
    const int vectors = quant_vectors(rows, Format::layout.is_split);
    return vectors < kPanelVectors ? vectors : kPanelVectors;
}

// `rows` rows over one block; returns what is left to fetch.
template <typename Format, int rows, typename Groups>
FarFetch quant_rows(const QuantTask &task, int64_t row, int64_t group, int64_t n_groups,
                    const Groups &groups, const BlockScales &scales, float *acc, FarFetch fetch) {
    constexpr QuantLayout layout = Format::layout;
    // Bytes that were unpacked for kernels with signed weights have the zero taken off.
    constexpr int zero = Groups::is_signed ? 0 : layout.bits == 8 ? kByteOffset : layout.zero;
    constexpr int vectors = vectors_of<Format>(rows);
    for (int v = 0; v < kPanelVectors; v += vectors) {
        quant_tile<rows, vectors, zero, layout.is_split, layout.has_min>(
            task.x, row, group, n_groups, groups, v, scales, acc + row * kQuantPanel, fetch);
        fetch = fetch.after(n_groups);
    }
    return fetch;
}

// The same for `n` rows, one of the heights that quant_height gives.
template <typename Format, int rows = kQuantRows, typename Groups>
FarFetch quant_some_rows(int64_t n, const QuantTask &task, int64_t row, int64_t group,
                         int64_t n_groups, const Groups &groups, const BlockScales &scales,
                         float *acc, FarFetch fetch) {
    if constexpr (rows > 1) {
        if (quant_height(rows) != rows || n < rows) {
            return quant_some_rows<Format, rows - 1>(n, task, row, group, n_groups, groups, scales,
                                                     acc, fetch);
        }
    }
    if constexpr (quant_height(rows) == rows) {
        fetch = quant_rows<Format, rows>(task, row, group, n_groups, groups, scales, acc, fetch);
    }
    return fetch;
}

// Tiles that go over a block, for m rows.
template <typename Format> int64_t passes_of(int64_t m) {
    int64_t passes = 0;
    for (int64_t n; m > 0; m -= n) {
        n = quant_height(m);
        passes += kPanelVectors / vectors_of<Format>(int(n));
    }
    return passes;
}

// All rows of the task over one block, while the bytes [next, end) are fetched.
template <typename Format, typename Groups>
void quant_block(const QuantTask &task, int64_t group, int64_t n_groups, const Groups &groups,
                 const BlockScales &scales, float *acc, const std::byte *next,
                 const std::byte *end) {
    const char *first = reinterpret_cast<const char *>(next);
    const int64_t steps = passes_of<Format>(task.out.m) * n_groups;
    FarFetch fetch = {first, reinterpret_cast<const char *>(end), first,
                      (end - next + steps - 1) / steps};
    for (int64_t row = 0, n; row < task.out.m; row += n) {
        n = quant_height(task.out.m - row);
        fetch = quant_some_rows<Format>(n, task, row, group, n_groups, groups, scales, acc, fetch);
    }
}

template <int c, int zero, typename Groups>
inline void unpack_pair(std::byte *out, const Groups &groups, int64_t group, int vector) {
    BytePair pair = groups.template pair<c>(group, vector);
    if constexpr (!kUnsignedWeights && zero != 0) {
        pair = {sub_bytes<zero>(pair.low), sub_bytes<zero>(pair.high)};
    }
    store_bytes(out + c * 128 + vector * kLanes * 4, pair.low);
    store_bytes(out + (c + 4) * 128 + vector * kLanes * 4, pair.high);
}

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

// Scales and mins of the groups [group, group + n) of a panel whose headers begin at `header`.
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
            constexpr int64_t kGroups = layout.grouped / kQuantGroup; // that share s and z
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

template <typename Format> void quant_linear(const QuantTask &task) {
    constexpr QuantLayout layout = Format::layout;
    alignas(64) float acc[ops::cpu::kLinearRows * kQuantPanel];
    alignas(64) std::byte bytes[layout.bits == 8 ? 64 : kBlockGroups * kGroupBytes];
    BlockScales scales;
    const int64_t groups = task.x.k / kQuantGroup;
    const int64_t panels = (task.out.n + kQuantPanel - 1) / kQuantPanel;
    const bool unpack = layout.bits < 8 && task.out.m > kPackedRows;
    for (int64_t p = 0; p < panels; ++p) {
        const std::byte *panel = task.w + p * layout.panel_bytes(task.x.k);
        const std::byte *header = panel + layout.front_bytes(task.x.k);
        for (int64_t i = 0; i < task.out.m * kQuantPanel; ++i) {
            acc[i] = 0.0f;
        }
        for (int64_t group = 0; group < groups; group += kBlockGroups) {
            const int64_t n = groups - group < kBlockGroups ? groups - group : kBlockGroups;
            const std::byte *next = header + n * layout.group_bytes();
            const std::byte *end = next + n * layout.group_bytes();
            read_scales<Format>(panel, header, group, n, &scales);
            const PackedGroups<layout.bits> packed = {header + layout.group_header(),
                                                      layout.group_bytes()};
            if (unpack) {
                unpack_groups<layout.zero>(bytes, packed, n);
                const PackedGroups<8> wide = {bytes, kGroupBytes};
                quant_block<Format>(task, group, n, wide, scales, acc, next, end);
            } else {
                quant_block<Format>(task, group, n, packed, scales, acc, next, end);
            }
            header = next;
        }
        finish_panel(task.out, p, acc);
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
