// Linear over quantised panels with tile registers, for many rows; compiled per instruction set for
// bytes, after quant_kernel.hpp.
//
// A tile product takes 16 rows x 32 values x 16 outputs, one group of 32, because every group has
// its own scale: half of a tile's depth. Its sums go through memory (a few groups at a time stay in
// L1) and are weighted and accumulated in f32 group by group, exactly as in quant_tile: the sums
// are integers, so results are bitwise identical to the kernel without tiles.
//
// Bound: the f32 arithmetic, two operations for a vector of 16 sums (three with minimums), 16
// cycles beside the 16 of the tile product (Sapphire Rapids); byte products without tiles take 64
// and the same 16. Five of the eight tiles are used: a core whose sibling thread also uses tiles is
// faster this way.
#pragma once

#include "device/cpu/tiles.hpp"
#include "ops/cpu/quant_kernel.hpp"

namespace llaisys::LLAISYS_CPU_NS {

static_assert(ops::cpu::kRowBlock == kTileHeight);

constexpr int64_t kTileBlockGroups = 8; // of a block of weights: L1 holds it beside the sums
constexpr int64_t kSumGroups = 4;       // groups whose sums are in memory
constexpr int64_t kHalf = kTileHeight * kQuantPanel; // sums of a group for 16 rows
constexpr int64_t kSumInts = 2 * kHalf;              // of a group, for 32 rows or in two parts
constexpr int64_t kSumRow = kQuantPanel * int64_t(sizeof(int32_t)); // bytes

// Minimum number of rows for tiles; fewer rows are as fast or faster without
// (docs/internals/measurements/2026-11-16-xeon-amx.md). 8-bit weights need no unpacking there, and
// two scales per 32 values leave a quarter of a tile's depth.
constexpr int64_t min_tile_rows(const QuantLayout &layout) {
    return layout.bits == 8 || layout.is_split ? 64 : 32;
}

// Tiles 0 and 1 are accumulators, 2 rows of x, 3 and 4 weights of 16 outputs each.
template <bool is_split> constexpr TileShapes quant_shapes() {
    constexpr int x_bytes = is_split ? 16 : 32; // values of k that share a scale
    return {{16, 16, 16, x_bytes / 4, x_bytes / 4, 0, 0, 0}, {64, 64, x_bytes, 64, 64, 0, 0, 0}};
}

// sums [16, 32] = x (16 rows) times the weights in tiles 3 and 4, begun with kSumStart. The columns 16 to
// 31 stay in tile 1; those of the previous call are stored at `late`. A store right after its product
// waits for it, and the following products wait for the store.
template <typename Tiles> void multiply_half(const int8_t *x, int32_t *sums, int32_t *late) {
    alignas(64) static constexpr int32_t kStart[16] = {
        kSumStart, kSumStart, kSumStart, kSumStart, kSumStart, kSumStart, kSumStart, kSumStart,
        kSumStart, kSumStart, kSumStart, kSumStart, kSumStart, kSumStart, kSumStart, kSumStart};
    Tiles::template load<2>(x, kQuantGroup);
    Tiles::template load<0>(kStart, 0); // the same line for every row
    Tiles::template dot_bytes<0, 2, 3>();
    Tiles::template store<1>(late, kSumRow);
    Tiles::template load<1>(kStart, 0);
    Tiles::template dot_bytes<1, 2, 4>();
    Tiles::template store<0>(sums, kSumRow);
}

template <typename Tiles> void load_weights(const std::byte *w) {
    Tiles::template load<3>(w, kSumRow);
    Tiles::template load<4>(w + 64, kSumRow);
}

// sums [32, 32] = x (16 rows) and `second` (the next 16, or null) times a group of signed bytes w.
// Returns the next call's `late`.
template <typename Tiles>
int32_t *multiply_group(const int8_t *x, const int8_t *second, const std::byte *w, int32_t *sums,
                        int32_t *late) {
    load_weights<Tiles>(w);
    multiply_half<Tiles>(x, sums, late);
    if (second == nullptr) {
        return sums + kTileHeight;
    }
    multiply_half<Tiles>(second, sums + kHalf, sums + kTileHeight);
    return sums + kHalf + kTileHeight;
}

// The same for 16 rows where the first 16 values of k and the others have separate sums: those of
// the others are the second half.
template <typename Tiles>
int32_t *multiply_split_group(const int8_t *x, const std::byte *w, int32_t *sums, int32_t *late) {
    load_weights<Tiles>(w);
    multiply_half<Tiles>(x, sums, late);
    load_weights<Tiles>(w + kGroupBytes / 2);
    multiply_half<Tiles>(x + 16, sums + kHalf, sums + kTileHeight);
    return sums + kHalf + kTileHeight;
}

inline vi load_sum(const int32_t *p) {
    vi sum;
    __builtin_memcpy(&sum, p, sizeof sum);
    return sum;
}

// acc [rows, 32] += the weighted sums of n groups, for up to 16 rows, all in one block. s and m are
// the scales and minimums of the first group, `about` the rows' data there.
template <typename Format, int n>
void add_sums(float *__restrict acc, int64_t rows, const int32_t *sums, const float *s,
              const float *m, const QuantGroup *about) {
    constexpr QuantLayout layout = Format::layout;
    constexpr int64_t kParts = layout.is_split ? 2 : 1;
    for (int64_t r = 0; r < rows; ++r, acc += kQuantPanel, sums += kQuantPanel) {
#pragma GCC unroll 8
        for (int v = 0; v < kPanelVectors; ++v) {
            vf total = load(acc + v * kLanes);
#pragma GCC unroll 8
            for (int j = 0; j < n; ++j) {
                const int32_t *sum = sums + j * kSumInts + v * kLanes;
                const float *scales = s + j * kParts * kQuantPanel + v * kLanes;
                const GroupScale<layout.grouped == 0> scale(load(scales));
                const vf high = layout.is_split ? sum_of(load_sum(sum + kHalf)) : zero();
                total = add_group<layout.is_split, layout.has_min>(
                    total, scale.times(load_sum(sum)), high, scales,
                    m + j * kParts * kQuantPanel + v * kLanes, about[j * kTileHeight + r]);
            }
            store(acc + v * kLanes, total);
        }
    }
}

// The same for up to kSumGroups groups.
template <typename Format, int most = int(kSumGroups)>
void add_some_sums(int64_t n, float *acc, int64_t rows, const int32_t *sums, const float *s,
                   const float *m, const QuantGroup *about) {
    if constexpr (most > 1) {
        if (n < most) {
            return add_some_sums<Format, most - 1>(n, acc, rows, sums, s, m, about);
        }
    }
    add_sums<Format, most>(acc, rows, sums, s, m, about);
}

// acc [m, 32] += all rows of the task times a block of signed bytes, while [next, end) is
// prefetched.
template <typename Tiles, typename Format>
void quant_tiles(const QuantTask &task, int64_t group, int64_t n_groups, const std::byte *bytes,
                 const BlockScales &scales, float *acc, const std::byte *next,
                 const std::byte *end) {
    constexpr QuantLayout layout = Format::layout;
    constexpr int64_t kRows = layout.is_split ? kTileHeight : 2 * kTileHeight;
    constexpr int64_t kParts = layout.is_split ? 2 : 1;
    alignas(64) int32_t sums[kSumGroups * kSumInts];
    const char *first = reinterpret_cast<const char *>(next);
    const int64_t steps = (task.out.m + kRows - 1) / kRows * n_groups;
    FarFetch fetch = {first, reinterpret_cast<const char *>(end), first,
                      (end - next + steps - 1) / steps};
    for (int64_t row = 0; row < task.out.m; row += kRows) {
        const int64_t left = task.out.m - row;
        const int64_t rows = left < kRows ? left : kRows;
        for (int64_t g = 0; g < n_groups; g += kSumGroups) {
            const int64_t n = n_groups - g < kSumGroups ? n_groups - g : kSumGroups;
            int32_t *late = sums; // written again later
            for (int64_t j = 0; j < n; ++j) {
                fetch.step();
                const int8_t *x = task.x.q + task.x.at(row, group + g + j) * kQuantGroup;
                const std::byte *w = bytes + (g + j) * kGroupBytes;
                if constexpr (layout.is_split) {
                    late = multiply_split_group<Tiles>(x, w, sums + j * kSumInts, late);
                } else {
                    const int8_t *second =
                        rows > kTileHeight ? x + kTileHeight * task.x.k : nullptr;
                    late = multiply_group<Tiles>(x, second, w, sums + j * kSumInts, late);
                }
            }
            Tiles::template store<1>(late, kSumRow);
            const int64_t s = g * kParts * kQuantPanel;
            for (int64_t r = 0; r < rows; r += kTileHeight) {
                add_some_sums<Format>(n, acc + (row + r) * kQuantPanel,
                                      rows - r < kTileHeight ? rows - r : kTileHeight,
                                      sums + r * kQuantPanel, scales.s + s, scales.m + s,
                                      task.x.groups + task.x.at(row + r, group + g));
            }
        }
    }
}

// A product whose result is not used, while the vector units work: an idle tile unit switches itself
// off.
template <typename Tiles> void keep_awake() { Tiles::template dot_bytes<0, 2, 3>(); }

// quant_linear with tiles for min_tile_rows() rows and more; `few_rows` is called for fewer. All 16
// rows of the last block of x are read.
template <typename Tiles, typename Format>
void quant_linear_tiles(const QuantTask &task, void (*few_rows)(const QuantTask &)) {
    constexpr QuantLayout layout = Format::layout;
    // To signed bytes without the zero point; 128 is -128 in a byte.
    constexpr int kTaken = layout.bits == 8 ? -kByteOffset : layout.zero;
    if (task.out.m < min_tile_rows(layout)) {
        return few_rows(task);
    }
    alignas(64) float acc[ops::cpu::kLinearRows * kQuantPanel];
    alignas(64) std::byte bytes[kTileBlockGroups * kGroupBytes];
    BlockScales scales;
    const int64_t groups = task.x.k / kQuantGroup;
    const int64_t panels = (task.out.n + kQuantPanel - 1) / kQuantPanel;
    Tiles::configure(quant_shapes<layout.is_split>());
    for (int64_t p = 0; p < panels; ++p) {
        const std::byte *panel = task.w + p * layout.panel_bytes(task.x.k);
        const std::byte *header = panel + layout.front_bytes(task.x.k);
        for (int64_t i = 0; i < task.out.m * kQuantPanel; ++i) {
            acc[i] = 0.0f;
        }
        for (int64_t group = 0; group < groups; group += kTileBlockGroups) {
            const int64_t n = groups - group < kTileBlockGroups ? groups - group : kTileBlockGroups;
            const std::byte *next = header + n * layout.group_bytes();
            read_scales<Format>(panel, header, group, n, &scales);
            for (int64_t g = 0; g < n; g += kSumGroups) {
                keep_awake<Tiles>();
                const PackedGroups<layout.bits> packed = {header + layout.group_header() +
                                                              g * layout.group_bytes(),
                                                          layout.group_bytes()};
                unpack_groups<kTaken>(bytes + g * kGroupBytes, packed, smaller(n - g, kSumGroups));
            }
            quant_tiles<Tiles, Format>(task, group, n, bytes, scales, acc, next,
                                       next + n * layout.group_bytes());
            header = next;
        }
        finish_panel(task.out, p, FloatSums{acc});
    }
    Tiles::release();
}

} // namespace llaisys::LLAISYS_CPU_NS
