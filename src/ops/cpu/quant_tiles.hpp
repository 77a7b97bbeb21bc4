// The product over quantised panels with tile registers, for many rows; compiled per instruction set
// for bytes, after quant_kernel.hpp.
//
// A tile product takes 16 rows x 32 values x 16 outputs, one group of 32, because every group has
// scales of its own: half of a tile's depth. Its sums go through memory (a few groups at a time stay in
// the first cache) and are weighted and added up in f32 group by group, exactly as in quant_tile: the
// sums are whole numbers, so a row has the same bits whichever way it went.
//
// Limit: the f32 arithmetic, three operations for a vector of 16 sums, 24 cycles beside the 16 of the
// tile product (Sapphire Rapids); byte products without tiles take 64 and the same 24.
#pragma once

#include "device/cpu/tiles.hpp"
#include "ops/cpu/quant_kernel.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr int64_t kSumGroups = 4;                                   // whose sums wait in memory
constexpr int64_t kSumInts = 2 * kTileHeight * kQuantPanel;         // of one group, in two halves
constexpr int64_t kMinTileRows = ops::cpu::kMinTileRows;            // fewer go without tiles
constexpr int64_t kSumRow = kQuantPanel * int64_t(sizeof(int32_t)); // bytes

// Tiles 0..3 are sums, 4 and 5 rows of x, 6 and 7 weights of 16 outputs each.
template <bool is_split> constexpr TileShapes quant_shapes() {
    constexpr int x_bytes = is_split ? 16 : 32; // values of k that share a scale
    return {{16, 16, 16, 16, 16, 16, x_bytes / 4, x_bytes / 4},
            {64, 64, 64, 64, x_bytes, x_bytes, 64, 64}};
}

// sums [32, 32] = x (16 rows, or 32 where there is a second half) times a group of signed bytes w.
template <typename Tiles>
void multiply_group(const int8_t *x, const std::byte *w, bool has_second, int32_t *sums) {
    Tiles::template load<6>(w, kSumRow);
    Tiles::template load<7>(w + 64, kSumRow);
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template load<4>(x, kQuantGroup);
    Tiles::template dot_bytes<0, 4, 6>();
    Tiles::template dot_bytes<1, 4, 7>();
    if (has_second) {
        Tiles::template zero<2>();
        Tiles::template zero<3>();
        Tiles::template load<5>(x + kTileHeight * kQuantGroup, kQuantGroup);
        Tiles::template dot_bytes<2, 5, 6>();
        Tiles::template dot_bytes<3, 5, 7>();
        int32_t *second = sums + kTileHeight * kQuantPanel;
        Tiles::template store<2>(second, kSumRow);
        Tiles::template store<3>(second + 16, kSumRow);
    }
    Tiles::template store<0>(sums, kSumRow);
    Tiles::template store<1>(sums + 16, kSumRow);
}

// The same for 16 rows where the first 16 values of k and the others have sums of their own: those of
// the others are the second half.
template <typename Tiles>
void multiply_split_group(const int8_t *x, const std::byte *w, int32_t *sums) {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
    Tiles::template load<4>(x, kQuantGroup);
    Tiles::template load<5>(x + 16, kQuantGroup);
    Tiles::template load<6>(w, kSumRow);
    Tiles::template load<7>(w + 64, kSumRow);
    Tiles::template dot_bytes<0, 4, 6>();
    Tiles::template dot_bytes<1, 4, 7>();
    Tiles::template load<6>(w + kGroupBytes / 2, kSumRow);
    Tiles::template load<7>(w + kGroupBytes / 2 + 64, kSumRow);
    Tiles::template dot_bytes<2, 5, 6>();
    Tiles::template dot_bytes<3, 5, 7>();
    int32_t *rest = sums + kTileHeight * kQuantPanel;
    Tiles::template store<0>(sums, kSumRow);
    Tiles::template store<1>(sums + 16, kSumRow);
    Tiles::template store<2>(rest, kSumRow);
    Tiles::template store<3>(rest + 16, kSumRow);
}

inline vf load_sum(const int32_t *p) {
    vi sum;
    __builtin_memcpy(&sum, p, sizeof sum);
    return to_float(sum);
}

// acc [m, 32] += all rows of the task times a block of signed bytes, while [next, end) is fetched.
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
            for (int64_t j = 0; j < n; ++j) {
                fetch.step();
                const int64_t at = (group + g + j) * task.x.stride + row;
                const int8_t *x = task.x.q + at * kQuantGroup;
                const std::byte *w = bytes + (g + j) * kGroupBytes;
                if constexpr (layout.is_split) {
                    multiply_split_group<Tiles>(x, w, sums + j * kSumInts);
                } else {
                    multiply_group<Tiles>(x, w, rows > kTileHeight, sums + j * kSumInts);
                }
            }
            const QuantGroup *about = task.x.groups + (group + g) * task.x.stride + row;
            for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 8
                for (int v = 0; v < kPanelVectors; ++v) {
                    const int64_t column = v * kLanes;
                    float *place = acc + (row + r) * kQuantPanel + column;
                    vf total = load(place);
                    for (int64_t j = 0; j < n; ++j) {
                        const int32_t *sum = sums + j * kSumInts + r * kQuantPanel + column;
                        const int64_t s = (g + j) * kParts * kQuantPanel + column;
                        const vf high =
                            layout.is_split ? load_sum(sum + kTileHeight * kQuantPanel) : zero();
                        total = add_group<layout.is_split, layout.has_min>(
                            total, mul(load_sum(sum), load(scales.s + s)), high, scales.s + s,
                            scales.m + s, about[j * task.x.stride + r]);
                    }
                    store(place, total);
                }
            }
        }
    }
}

// The q of n groups as signed bytes with nothing to be taken off any more.
template <typename Format, typename Groups>
void unpack_signed(std::byte *out, const Groups &groups, int64_t n_groups) {
    constexpr QuantLayout layout = Format::layout;
    constexpr int kTaken = layout.bits == 8 ? -kByteOffset : layout.zero; // 128 is -128 in a byte
    const auto unpack = [&](auto c, int64_t g, int v) {
        const BytePair pair = groups.template pair<decltype(c)::value>(g, v);
        std::byte *to = out + g * kGroupBytes + decltype(c)::value * 128 + v * kLanes * 4;
        store_bytes(to, sub_bytes<kTaken>(pair.low));
        store_bytes(to + 4 * 128, sub_bytes<kTaken>(pair.high));
    };
    for (int64_t g = 0; g < n_groups; ++g) {
        for (int v = 0; v < kPanelVectors; ++v) {
            unpack(std::integral_constant<int, 0>(), g, v);
            unpack(std::integral_constant<int, 1>(), g, v);
            unpack(std::integral_constant<int, 2>(), g, v);
            unpack(std::integral_constant<int, 3>(), g, v);
        }
    }
}

// quant_linear with tiles for kMinTileRows rows and more. Up to 15 rows of x behind the last are read.
template <typename Tiles, typename Format> void quant_linear_tiles(const QuantTask &task) {
    constexpr QuantLayout layout = Format::layout;
    if (task.out.m < kMinTileRows) {
        return quant_linear<Format>(task);
    }
    alignas(64) float acc[ops::cpu::kLinearRows * kQuantPanel];
    alignas(64) std::byte bytes[kBlockGroups * kGroupBytes];
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
        for (int64_t group = 0; group < groups; group += kBlockGroups) {
            const int64_t n = groups - group < kBlockGroups ? groups - group : kBlockGroups;
            const std::byte *next = header + n * layout.group_bytes();
            read_scales<Format>(panel, header, group, n, &scales);
            const PackedGroups<layout.bits> packed = {header + layout.group_header(),
                                                      layout.group_bytes()};
            unpack_signed<Format>(bytes, packed, n);
            quant_tiles<Tiles, Format>(task, group, n, bytes, scales, acc, next,
                                       next + n * layout.group_bytes());
            header = next;
        }
        finish_panel(task.out, p, acc);
    }
    Tiles::release();
}

} // namespace llaisys::LLAISYS_CPU_NS
