// Linear over quantised panels, compiled per instruction set for bytes; included after
// simd_<isa>.hpp and bytes_<isa>.hpp.
//
// Bound: bytes of the packed weights for one row, byte products for many: 8 of them and 2 f32
// operations (3 with minimums) per group of 32 values. A block of up to 20 groups (640 values of k)
// of a panel is processed at a time: its scales are converted to f32 once, with many rows its q are
// unpacked once, and register tiles of rows x outputs run over it.
#pragma once

#include "device/cpu/simd.hpp"
#include "ops/cpu/linear_kernel.hpp"
#include "ops/cpu/quant_block.hpp"

namespace llaisys::LLAISYS_CPU_NS {

// Where the sums of a tile start and end: they start at zero in the first block, and the last block
// writes f32 results directly instead of acc [rows, 32].
struct TileEnds {
    float *acc;    // [m, 32]
    bool is_first; // acc has not been written yet
    float *out;    // [m, 32], rows ldo apart; null: not the last block, or results are not f32
    int64_t ldo;
    const float *bias; // [32]

    TileEnds from(int64_t row) const {
        return {acc + row * kQuantPanel, is_first, out != nullptr ? out + row * ldo : out, ldo,
                bias};
    }
};

// Byte-product sums of one group: low for its first 16 values of k, high for the others where they
// have their own scale. V: vi or vw.
template <typename V, int rows, int vectors, bool is_split> struct GroupSums {
    V low[rows][vectors];
    V high[is_split ? rows : 1][is_split ? vectors : 1];
};

// The same with the weights of all vectors in registers: row by row, so that an x is broadcast once
// and two uses of a sum are far apart.
template <int c, typename V, int rows, int vectors, bool is_split, typename Groups>
inline __attribute__((always_inline)) void
quant_step_by_rows(GroupSums<V, rows, vectors, is_split> &sums, const ByteGroup (&x)[rows],
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
            V &sum = is_split ? sums.high[is_split ? r : 0][is_split ? v : 0] : sums.low[r][v];
            sum = dot<c + 4, Groups::is_signed>(sum, w[v].high, x[r]);
        }
    }
}

// The quads c and c + 4 of a group.
template <int c, typename V, int rows, int vectors, bool is_split, typename Groups>
inline __attribute__((always_inline)) void
quant_step(GroupSums<V, rows, vectors, is_split> &sums, const ByteGroup (&x)[rows],
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
    // Explicitly interleaved: the compiler would emit one dependent chain per row.
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            hold(sums.low[r][v]);
        }
    }
}

// sums += the quads [c, c + n) and [c + 4, c + 4 + n) of a group.
template <int c, int n, typename Sums, int rows, typename Groups>
inline __attribute__((always_inline)) void quant_steps(Sums &sums, const ByteGroup (&x)[rows],
                                                       const Groups &groups, int64_t group,
                                                       int vector) {
    quant_step<c>(sums, x, groups, group, vector);
    if constexpr (n > 1) {
        quant_steps<c + 1, n - 1>(sums, x, groups, group, vector);
    }
}

// Likewise from quad c on, in 16 bits for n quads at a time.
template <int c, int n, int rows, int vectors, bool is_split, typename Groups>
inline __attribute__((always_inline)) void
quant_words(GroupSums<vi, rows, vectors, is_split> &sums, const ByteGroup (&x)[rows],
            const Groups &groups, int64_t group, int vector) {
    GroupSums<vw, rows, vectors, is_split> words{};
    quant_steps<c, n>(words, x, groups, group, vector);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            sums.low[r][v] = add_words(sums.low[r][v], words.low[r][v]);
            if constexpr (is_split) {
                sums.high[r][v] = add_words(sums.high[r][v], words.high[r][v]);
            }
        }
    }
    if constexpr (c + n < 4) {
        quant_words<c + n, n>(sums, x, groups, group, vector);
    }
}

// Quads c of which the sums fit in 16 bits: a lane adds two products |q x| <= (2^bits - 1) * 127 per
// quad, and quad c + 4 as well unless it has a sum of its own.
constexpr int word_quads(int bits, bool is_split) {
    const int quads = 32767 / (2 * 127 * ((1 << bits) - 1)) / (is_split ? 1 : 2);
    return quads >= 4 ? 4 : quads; // 1 or 2 otherwise: divides 4
}
static_assert(word_quads(4, false) == 4 && word_quads(5, false) == 2 && word_quads(6, true) == 2);

// sums += the products of a group.
template <int rows, int vectors, bool is_split, typename Groups>
inline __attribute__((always_inline)) void
quant_group(GroupSums<vi, rows, vectors, is_split> &sums, const ByteGroup (&x)[rows],
            const Groups &groups, int64_t group, int vector) {
    if constexpr (kWordSums && Groups::kValueBits < 8) {
        quant_words<0, word_quads(Groups::kValueBits, is_split)>(sums, x, groups, group, vector);
    } else {
        quant_steps<0, 4>(sums, x, groups, group, vector);
    }
}

// Factor of the sums of one group. Where sums are kept as the bits of kSumBase + sum, a scale with
// few bits, whose product with kSumBase is exact, needs one operation, with bitwise identical
// results.
template <bool is_short> struct GroupScale {
    static constexpr bool is_fused = is_short && kSumStart != 0;
    vf scale, base;
    explicit GroupScale(vf s) : scale(s), base(is_fused ? mul(s, set1(-kSumBase)) : s) {}
    vf times(vi sum) const {
        if constexpr (is_fused) {
            return fma(float_of_bits(sum), scale, base);
        }
        return mul(sum_of(sum), scale);
    }
};

// total + the weighted sums of one group: `weighted` is `low` (all 32 values, or the first 16)
// times its scale, s and m are the scales and minimums of the group at one vector of outputs,
// `about` the row's group data. All kernels use this function, so results are bitwise identical.
template <bool is_split, bool has_min>
inline __attribute__((always_inline)) vf add_group(vf total, vf weighted, vf high, const float *s,
                                                   const float *m, const QuantGroup &about) {
    if constexpr (is_split) {
        weighted = fma(high, load(s + kQuantPanel), weighted);
    }
    if constexpr (has_min && is_split) {
        weighted = fma(load(m), set1(-float(about.first)), weighted);
        weighted = fma(load(m + kQuantPanel), set1(-float(about.rest)), weighted);
    } else if constexpr (has_min) {
        weighted = fma(load(m), set1(about.minus), weighted);
    }
    return fma(weighted, set1(about.scale), total);
}

// acc [rows, 32], columns from `vector` on += the block, for `rows` rows from `row` on. `group` is
// the index of the block's first group in a row of x.
template <int rows, int vectors, int zero_point, bool is_split, bool has_min, bool is_short,
          typename Groups, typename F>
void quant_tile(const QuantRows &x, int64_t row, int64_t group, int64_t n_groups,
                const Groups &groups, int vector, const BlockScales &scales, const TileEnds &ends,
                F fetch) {
    constexpr int64_t kParts = is_split ? 2 : 1;
    vf total[rows][vectors];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            if (ends.out != nullptr) { // prefetch the line that the tile writes at its end
                __builtin_prefetch(ends.out + r * ends.ldo + (vector + v) * kLanes, 1, 3);
            }
            total[r][v] = zero();
            if (!ends.is_first) {
                total[r][v] = load(ends.acc + r * kQuantPanel + (vector + v) * kLanes);
            }
        }
    }
    const int8_t *q = x.q + x.at(row, group) * kQuantGroup;
    const QuantGroup *about = x.groups + x.at(row, group);
    const float *s = scales.s + vector * kLanes;
    const float *m = scales.m + vector * kLanes;
    for (int64_t g = 0; g < n_groups; ++g) {
        fetch.step();
        GroupSums<vi, rows, vectors, is_split> sums;
        ByteGroup xg[rows];
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            xg[r] = load_group(q + r * kQuantGroup);
            vi low = start_sum(0);
            vi high = start_sum(0);
            if constexpr (zero_point != 0 && is_split) {
                low = start_sum_less<zero_point>(broadcast_int(&about[r].first));
                high = start_sum_less<zero_point>(broadcast_int(&about[r].rest));
            } else if constexpr (zero_point == 8) {
                low = broadcast_int(&about[r].less_8);
            } else if constexpr (zero_point == 128) {
                low = broadcast_int(&about[r].less_128);
            } else if constexpr (zero_point != 0) {
                const int32_t total = about[r].first + about[r].rest;
                low = start_sum_less<zero_point>(broadcast_int(&total));
            }
#pragma GCC unroll 8
            for (int v = 0; v < vectors; ++v) {
                sums.low[r][v] = low;
                if constexpr (is_split) {
                    sums.high[r][v] = high;
                }
            }
        }
        quant_group(sums, xg, groups, g, vector);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            const GroupScale<is_short> scale(load(s + v * kLanes));
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                const vf high =
                    is_split ? sum_of(sums.high[is_split ? r : 0][is_split ? v : 0]) : zero();
                total[r][v] =
                    add_group<is_split, has_min>(total[r][v], scale.times(sums.low[r][v]), high,
                                                 s + v * kLanes, m + v * kLanes, about[r]);
            }
        }
        q += x.height * kQuantGroup;
        about += x.height;
        s += kParts * kQuantPanel;
        m += kParts * kQuantPanel;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < vectors; ++v) {
            const int64_t column = (vector + v) * kLanes;
            if (ends.out == nullptr) {
                store(ends.acc + r * kQuantPanel + column, total[r][v]);
            } else if (ends.bias == nullptr) {
                store(ends.out + r * ends.ldo + column, total[r][v]);
            } else {
                store(ends.out + r * ends.ldo + column, add(total[r][v], load(ends.bias + column)));
            }
        }
    }
}

template <typename Format> constexpr int vectors_of(int rows) {
    const int vectors = quant_vectors(rows, Format::layout.is_split);
    return vectors < kPanelVectors ? vectors : kPanelVectors;
}

// `rows` rows over one block; returns the remaining prefetch.
template <typename Format, int rows, typename Groups, typename F>
F quant_rows(const QuantTask &task, int64_t row, int64_t group, int64_t n_groups,
             const Groups &groups, const BlockScales &scales, const TileEnds &ends, F fetch) {
    constexpr QuantLayout layout = Format::layout;
    // For kernels with signed weights the zero point is already subtracted from unpacked bytes.
    constexpr int zero = Groups::is_signed ? 0 : layout.bits == 8 ? kByteOffset : layout.zero;
    constexpr int vectors = vectors_of<Format>(rows);
    for (int v = 0; v < kPanelVectors; v += vectors) {
        quant_tile<rows, vectors, zero, layout.is_split, layout.has_min, layout.grouped == 0>(
            task.x, row, group, n_groups, groups, v, scales, ends.from(row), fetch);
        fetch = fetch.after(n_groups);
    }
    return fetch;
}

// The same for `n` rows, one of the heights of quant_height.
template <typename Format, int rows = kQuantRows, typename Groups>
FarFetch quant_some_rows(int64_t n, const QuantTask &task, int64_t row, int64_t group,
                         int64_t n_groups, const Groups &groups, const BlockScales &scales,
                         const TileEnds &ends, FarFetch fetch) {
    if constexpr (rows > 1) {
        if (quant_height(rows) != rows || n < rows) {
            return quant_some_rows<Format, rows - 1>(n, task, row, group, n_groups, groups, scales,
                                                     ends, fetch);
        }
    }
    if constexpr (quant_height(rows) == rows) {
        fetch = quant_rows<Format, rows>(task, row, group, n_groups, groups, scales, ends, fetch);
    }
    return fetch;
}

// Rows of the tile that begins at `row`: at most the rest of its row block.
inline int64_t height_at(int64_t row, int64_t m) {
    const int64_t in_block = ops::cpu::kRowBlock - row % ops::cpu::kRowBlock;
    return quant_height(m - row < in_block ? m - row : in_block);
}

// Number of tiles over a block for m rows.
template <typename Format> int64_t passes_of(int64_t m) {
    int64_t passes = 0;
    for (int64_t row = 0, n; row < m; row += n) {
        n = height_at(row, m);
        passes += kPanelVectors / vectors_of<Format>(int(n));
    }
    return passes;
}

// All rows of the task over one block, while the bytes [next, end) are prefetched.
template <typename Format, typename Groups>
void quant_block(const QuantTask &task, int64_t group, int64_t n_groups, const Groups &groups,
                 const BlockScales &scales, const TileEnds &ends, const std::byte *next,
                 const std::byte *end) {
    const char *first = reinterpret_cast<const char *>(next);
    if constexpr (Format::layout.bits < 8) {
        if (task.out.m == 1) { // bound by instructions: no branch
            constexpr int64_t kBytes = Format::layout.group_bytes();
            constexpr int kPasses = kPanelVectors / vectors_of<Format>(1);
            static_assert(kBytes % 64 == 0);
            const LineFetch<int(kBytes / 64 + kPasses - 1) / kPasses> fetch = {first, kBytes};
            quant_rows<Format, 1>(task, 0, group, n_groups, groups, scales, ends, fetch);
            return;
        }
    }
    const int64_t steps = passes_of<Format>(task.out.m) * n_groups;
    FarFetch fetch = {first, reinterpret_cast<const char *>(end), first,
                      (end - next + steps - 1) / steps};
    for (int64_t row = 0, n; row < task.out.m; row += n) {
        n = height_at(row, task.out.m);
        fetch = quant_some_rows<Format>(n, task, row, group, n_groups, groups, scales, ends, fetch);
    }
}

// Destination of panel p's tiles: the results themselves where they are f32 and 32 wide.
inline TileEnds panel_ends(const ops::cpu::LinearTask &out, int64_t p, float *acc, float *bias) {
    const int64_t first = p * kQuantPanel;
    TileEnds ends = {acc, true, nullptr, out.ldo, nullptr};
    if (out.out_dtype == LLAISYS_DTYPE_F32 && out.n - first >= kQuantPanel) {
        ends.out = static_cast<float *>(out.out) + first;
        ends.bias = read_bias(out, first, kQuantPanel, bias);
    }
    return ends;
}

template <typename Format> void quant_linear(const QuantTask &task) {
    constexpr QuantLayout layout = Format::layout;
    alignas(64) float acc[ops::cpu::kLinearRows * kQuantPanel];
    alignas(64) std::byte bytes[layout.bits == 8 ? 64 : kBlockGroups * kGroupBytes];
    alignas(64) float bias[kQuantPanel];
    BlockScales scales;
    const int64_t groups = task.x.k / kQuantGroup;
    const int64_t blocks = (groups + kBlockGroups - 1) / kBlockGroups;
    const int64_t block = blocks > 0 ? (groups + blocks - 1) / blocks : 1; // nearly equal lengths
    const int64_t panels = (task.out.n + kQuantPanel - 1) / kQuantPanel;
    const bool unpack = layout.bits < 8 && task.out.m > kPackedRows;
    for (int64_t i = 0; groups == 0 && i < task.out.m * kQuantPanel; ++i) {
        acc[i] = 0.0f;
    }
    for (int64_t p = 0; p < panels; ++p) {
        const std::byte *panel = task.w + p * layout.panel_bytes(task.x.k);
        const std::byte *header = panel + layout.front_bytes(task.x.k);
        TileEnds ends = panel_ends(task.out, p, acc, bias);
        float *out = groups > 0 ? ends.out : nullptr; // with no groups all sums are zero
        for (int64_t group = 0, n; group < groups; group += n) {
            n = groups - group < block ? groups - group : block;
            const std::byte *next = header + n * layout.group_bytes();
            const std::byte *end = next + n * layout.group_bytes();
            ends.is_first = group == 0;
            ends.out = group + n == groups ? out : nullptr;
            read_scales<Format>(panel, header, group, n, &scales);
            const PackedGroups<layout.bits> packed = {header + layout.group_header(),
                                                      layout.group_bytes()};
            if (unpack) {
                constexpr bool is_unsigned = kUnsignedWeights || kWordSums;
                unpack_groups<is_unsigned ? 0 : layout.zero>(bytes, packed, n);
                const PackedGroups<8, is_unsigned ? layout.bits : 8> wide = {bytes, kGroupBytes};
                quant_block<Format>(task, group, n, wide, scales, ends, next, end);
            } else {
                quant_block<Format>(task, group, n, packed, scales, ends, next, end);
            }
            header = next;
        }
        if (out == nullptr) {
            finish_panel(task.out, p, FloatSums{acc});
        }
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
