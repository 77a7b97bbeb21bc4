// Kernels for tile registers on emulated tiles, so that they are checked on machines without them:
// quantised products bit for bit against the kernels without tiles, bf16 products and those of attention
// against a reference in double. On a machine with tiles the tests of the operators meet the real ones.
#define LLAISYS_CPU_NS cpu_test_tiles
#include "device/cpu/simd_portable.hpp"

#include "device/cpu/bytes_portable.hpp"
#include "emulated_tiles.hpp"

#include "device/cpu/simd.hpp"

namespace llaisys::LLAISYS_CPU_NS {

using PairTiles = EmulatedTiles;

} // namespace llaisys::LLAISYS_CPU_NS

#include "ops/cpu/attention_pair_tiles.hpp"
#include "ops/cpu/quant_tiles.hpp"
#include "ops/cpu/strip_bytes.hpp"
#include "ops/cpu/strip_tiles.hpp"

#include "ops_reference.hpp"

#include "ops/linear/op.hpp"

#include <vector>

using namespace ops_test;
namespace tiles = llaisys::cpu_test_tiles;
using llaisys::ops::cpu::QuantLayout;
using llaisys::ops::cpu::round_up;

namespace {

double to_bf16(double value) { return to_f32(from_f32<bf16_t>(float(value))); }

// Panels of random bytes with small scales, whatever they would mean in a file.
std::vector<std::byte> random_panels(const QuantLayout &layout, int64_t panels, int64_t k) {
    std::vector<std::byte> bytes(size_t(panels * layout.panel_bytes(k)));
    for (std::byte &byte : bytes) {
        byte = std::byte(random_int(0, 255));
    }
    const auto halves = [&](int64_t at, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
            const f16_t half = from_f32<f16_t>(float(random_int(-1000, 1000)) * 1e-4f);
            std::memcpy(bytes.data() + at + 2 * i, &half, sizeof half);
        }
    };
    for (int64_t p = 0; p < panels; ++p) {
        const int64_t panel = p * layout.panel_bytes(k);
        for (int64_t front = 0; front < layout.front_bytes(k); front += layout.super_bytes()) {
            if (layout.grouped != 0) {
                for (int64_t i = 0; i < 32; ++i) {
                    const float s = float(random_int(-1000, 1000)) * 1e-4f;
                    std::memcpy(bytes.data() + panel + front + 4 * i, &s, sizeof s);
                }
                halves(panel + front + 128, 32);
            } else {
                halves(panel + front, layout.super_bytes() / 2);
            }
        }
        for (int64_t g = 0; layout.super_bytes() == 0 && g < k / 32; ++g) {
            halves(panel + g * layout.group_bytes(), layout.group_header() / 2);
        }
    }
    return bytes;
}

template <size_t format> void check_format() {
    using Format = tiles::LayoutFormat<format>;
    const int64_t k = 768;
    const int64_t n = 45;
    const std::vector<std::byte> w = random_panels(Format::layout, 2, k);
    for (int64_t m : {1, 31, 32, 33, 63, 64, 65, 80, 97}) {
        const int64_t rows = m < 16 ? m : round_up(m, 16);
        std::vector<int8_t> q(size_t(rows * k));
        std::vector<ops::cpu::QuantGroup> groups(size_t(rows * k / 32));
        ops::cpu::QuantTask task;
        task.x = {q.data(), groups.data(), std::min<int64_t>(m, 16), k};
        for (int64_t i = 0; i < m; ++i) {
            const Tensor x = random_tensor({k}, kF32);
            ops::cpu::quant_kernels_of(Isa::portable)->quantise(task.x, i, x.as<float>());
        }
        task.w = w.data();
        const Tensor bias = random_tensor({n}, kF32);
        const Tensor outs[] = {random_tensor({m, n}, kF32), random_tensor({m, n}, kF32)};
        task.out = ops::cpu::LinearTask{};
        task.out.m = m;
        task.out.n = n;
        task.out.bias = bias.data();
        task.out.bias_dtype = kF32;
        task.out.out_dtype = kF32;
        task.out.ldo = n;
        task.out.out = outs[0].data();
        tiles::quant_linear<Format>(task);
        task.out.out = outs[1].data();
        tiles::quant_linear_tiles<tiles::EmulatedTiles, Format>(task, tiles::quant_linear<Format>);
        CHECK(same_bits(outs[0], outs[1]));
        CHECK(!tiles::EmulatedTiles::is_configured);
    }
}

template <size_t... formats> void check_formats(std::index_sequence<formats...>) {
    (check_format<formats>(), ...);
}

} // namespace

TEST(quantised_products_over_tiles_have_the_bits_of_those_without) {
    check_formats(std::make_index_sequence<ops::cpu::kQuantFormatCount>());
}

namespace {

// Rows [first, first + m) of x times a weight of n outputs in strips over emulated tiles.
template <typename Products>
Tensor tile_product(const Tensor &x, int64_t first, int64_t m, int64_t n, int64_t bytes,
                    const void *w, const float *scales) {
    constexpr bool is_bf16 = std::is_same_v<Products, tiles::Bf16Products>;
    const int64_t k = x.size(1);
    const Tensor out = random_tensor({m, n}, kF32);
    ops::cpu::LinearTask task{};
    task.m = m;
    task.w = w;
    task.n = n;
    task.out = out.data();
    task.out_dtype = kF32;
    task.ldo = n;
    std::vector<char> memory(size_t(round_up(m, 16) * bytes));
    std::vector<ops::cpu::RowScale> row_scales(static_cast<size_t>(m));
    const ops::cpu::TileRows rows = {memory.data(), std::min<int64_t>(m, 16), bytes,
                                     row_scales.data()};
    for (int64_t i = 0; i < m; ++i) {
        (is_bf16 ? tiles::place_row : tiles::place_byte_row)(rows, i,
                                                             x.as<float>() + (first + i) * k, k);
    }
    tiles::linear_tiles<tiles::EmulatedTiles, Products>({rows, task, scales});
    CHECK(!tiles::EmulatedTiles::is_configured);
    return out;
}

} // namespace

TEST(bf16_products_over_tiles_match_the_reference_in_any_batch) {
    const int64_t n = 45;
    for (int64_t k : {1, 31, 33, 600, 1100}) {
        const int64_t padded = round_up(k, 32);
        const Tensor x = random_tensor({70, k}, kF32);
        const Tensor weight = random_tensor({n, k}, kBf16);
        std::vector<bf16_t> w(size_t(2 * 32 * padded));
        for (int64_t j = 0; j < n; ++j) {
            for (int64_t i = 0; i < k; ++i) {
                w[size_t(j / 16 * 16 * padded + i / 2 * 32 + 2 * (j % 16) + i % 2)] =
                    weight.as<bf16_t>()[j * k + i];
            }
        }
        const auto product = [&](int64_t first, int64_t m) {
            return tile_product<tiles::Bf16Products>(x, first, m, n, 2 * padded, w.data(), nullptr);
        };
        const Tensor all = product(0, 70);
        for (int64_t i = 0; i < 70; ++i) {
            for (int64_t j = 0; j < n; ++j) {
                double sum = 0;
                double size = 0;
                for (int64_t c = 0; c < k; ++c) {
                    const double term = to_bf16(get2(x, i, c)) * get2(weight, j, c);
                    sum += term;
                    size += std::abs(term);
                }
                check_close("tiles", get2(all, i, j), sum, 1e-6 * size);
            }
        }
        for (int64_t m : {1, 2, 15, 16, 17, 32, 33, 49}) {
            CHECK(same_bits(product(5, m), all.slice(0, 5, 5 + m)));
        }
    }
}

TEST(byte_products_over_tiles_are_exact) {
    const int64_t n = 45;
    for (int64_t k : {32, 96, 1504}) {
        const int64_t padded = round_up(k, 64);
        const Tensor x = random_tensor({70, k}, kF32);
        std::vector<uint8_t> w(size_t(2 * 32 * padded));
        std::vector<float> scales(64);
        for (uint8_t &q : w) {
            q = uint8_t(random_int(0, 255));
        }
        for (float &scale : scales) {
            scale = float(random_int(1, 1000)) * 1e-4f;
        }
        for (int64_t m : {1, 2, 15, 16, 17, 32, 33, 49, 70}) {
            const Tensor out =
                tile_product<tiles::ByteProducts>(x, 0, m, n, padded, w.data(), scales.data());
            for (int64_t i = 0; i < m; ++i) {
                std::vector<int8_t> q(size_t(padded) + 64);
                ops::cpu::RowScale row;
                tiles::place_byte_row({reinterpret_cast<char *>(q.data()), 1, padded, &row}, 0,
                                      x.as<float>() + i * k, k);
                for (int64_t j = 0; j < n; ++j) {
                    int32_t sum = 0;
                    for (int64_t c = 0; c < k; ++c) {
                        const int64_t at = j / 16 * 16 * padded + c / 4 * 64 + j % 16 * 4 + c % 4;
                        sum += int32_t(q[size_t(c)]) * (int32_t(w[size_t(at)]) - 128);
                    }
                    CHECK_EQ(float(get2(out, i, j)), float(sum) * row.scale * scales[size_t(j)]);
                }
            }
        }
    }
}

TEST(rows_are_rounded_to_bf16_and_padded_with_zeros) {
    const float x[] = {kInf, -kInf, kNan, 3.0e38f, 1.0f + 0x1p-9f, 1.0f + 0x1p-8f + 0x1p-20f,
                       -0.0f};
    bf16_t tile[32];
    tiles::place_row({reinterpret_cast<char *>(tile), 1, sizeof tile, nullptr}, 0, x, 7);
    CHECK(to_f32(tile[0]) == kInf && to_f32(tile[1]) == -kInf && std::isnan(to_f32(tile[2])));
    CHECK(to_f32(tile[3]) == float(to_bf16(3.0e38)));
    CHECK(to_f32(tile[4]) == 1.0f && to_f32(tile[5]) == 1.0f + 0x1p-7f);
    for (int i = 6; i < 32; ++i) {
        CHECK(to_f32(tile[i]) == 0.0f);
    }
}

TEST(products_of_pairs_over_tiles_match_the_reference_in_any_row_tile) {
    ops::cpu::AttentionTask task{};
    task.k_dtype = task.v_dtype = kBf16;
    tiles::TilePlaces places{};
    tiles::TileFetch fetch(task, places, 1);
    constexpr int64_t kRows = 32;
    for (int64_t columns : {32, 64, 96, 160}) {
        for (int64_t pairs : {16, 48}) {
            const int64_t k = 2 * pairs;
            const Tensor x = random_tensor({kRows, k + 6}, kBf16);
            const Tensor weight = random_tensor({columns, k}, kBf16);
            std::vector<bf16_t> w(size_t(columns * k)); // [pairs, columns, 2]
            for (int64_t c = 0; c < columns; ++c) {
                for (int64_t i = 0; i < k; ++i) {
                    w[size_t((i / 2 * columns + c) * 2 + i % 2)] = weight.as<bf16_t>()[c * k + i];
                }
            }
            const int64_t lda = columns + 16;
            const Tensor before = random_tensor({kRows, lda}, kF32);
            const auto product = [&](int64_t n, bool is_sum) {
                std::vector<float> acc(before.as<float>(), before.as<float>() + kRows * lda);
                tiles::RowTiles row_tiles(1);
                row_tiles.multiply({n, reinterpret_cast<const char *>(x.as<bf16_t>()), 2 * (k + 6),
                                    reinterpret_cast<const char *>(w.data()), 4 * columns, pairs,
                                    acc.data(), lda, columns, is_sum},
                                   fetch);
                return acc;
            };
            for (bool is_sum : {false, true}) {
                const std::vector<float> all = product(kRows, is_sum);
                for (int64_t r = 0; r < kRows; ++r) {
                    for (int64_t c = 0; c < columns; ++c) {
                        double sum = is_sum ? get2(before, r, c) : 0;
                        double size = std::abs(sum);
                        for (int64_t i = 0; i < k; ++i) {
                            const double term = double(get2(x, r, i)) * get2(weight, c, i);
                            sum += term;
                            size += std::abs(term);
                        }
                        check_close("pairs", all[size_t(r * lda + c)], sum, 1e-6 * size);
                    }
                }
                for (int64_t n : {1, 7, 15, 16}) { // other rows are unchanged
                    const std::vector<float> some = product(n, is_sum);
                    CHECK(std::memcmp(some.data(), all.data(), size_t(n * lda) * 4) == 0);
                    CHECK(std::memcmp(some.data() + n * lda, before.as<float>() + n * lda,
                                      size_t((kRows - n) * lda) * 4) == 0);
                }
            }
            CHECK(!tiles::EmulatedTiles::is_configured);
        }
    }
}

TEST(products_of_entries_over_tiles_have_the_bits_of_products_of_rows) {
    ops::cpu::AttentionTask task{};
    task.k_dtype = task.v_dtype = kBf16;
    tiles::TilePlaces places{};
    tiles::TileFetch fetch(task, places, 1);
    constexpr int64_t kTile = tiles::kTile;
    for (int64_t pairs : {16, 48}) {
        for (int64_t n : {1, 7, 16}) {
            const Tensor keys = random_tensor({kTile, 2 * pairs}, kBf16);
            const Tensor q = random_tensor({n, 2 * pairs}, kBf16);
            const auto transposed = [&](const Tensor &x) { // [pairs, rows] of two values
                const int64_t rows = x.size(0);
                std::vector<bf16_t> out(size_t(2 * pairs * rows));
                for (int64_t i = 0; i < 2 * pairs * rows; ++i) {
                    const int64_t r = i / (2 * pairs);
                    const int64_t c = i % (2 * pairs);
                    out[size_t((c / 2 * rows + r) * 2 + c % 2)] = x.as<bf16_t>()[i];
                }
                return out;
            };
            const std::vector<bf16_t> q_pairs = transposed(q);
            const std::vector<bf16_t> key_pairs = transposed(keys);
            std::vector<float> entries(size_t(kTile * 16));
            std::vector<float> rows(size_t(n * kTile));
            tiles::RowTiles row_tiles(1);
            row_tiles.dot_entries(n, reinterpret_cast<const char *>(keys.as<bf16_t>()),
                                  reinterpret_cast<const char *>(q_pairs.data()), 4 * n, pairs,
                                  entries.data(), fetch);
            row_tiles.multiply({n, reinterpret_cast<const char *>(q.as<bf16_t>()), 4 * pairs,
                                reinterpret_cast<const char *>(key_pairs.data()), 4 * kTile, pairs,
                                rows.data(), kTile, kTile, false},
                               fetch);
            for (int64_t i = 0; i < n * kTile; ++i) {
                CHECK_EQ(entries[size_t(i % kTile * 16 + i / kTile)], rows[size_t(i)]);
            }
        }
    }
}
