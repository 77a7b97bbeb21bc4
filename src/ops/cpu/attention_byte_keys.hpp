// Attention scores of 8-bit keys as sums of byte products, with keys transposed to [d /
// 4][entry][4]. A query is rounded to 16 bits and split into two bytes, so that every sum is exact
// and independent of the tile shape. Included after simd_<isa>.hpp and bytes_<isa>.hpp; compiled
// per instruction set.
#pragma once

#include "ops/cpu/attention_tile.hpp"
#include "ops/cpu/prepared_attention.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr bool kScoresAreScaled = true;
constexpr int64_t kQueryStep = 16; // columns of a query are padded to a multiple of this
constexpr int kQueryBase = 254;    // x = lo - kQueryBase * hi, both within 127 of zero

// Layout of a query row: bytes hi [padded], lo [padded], then this struct.
struct QueryTail {
    float scale;    // x * scale is the value of the query
    int32_t offset; // sum of all x, times the offset added to key bytes
};
constexpr int64_t padded(int64_t d) { return ops::cpu::round_up(d, kQueryStep); }

// Vectors of entries that n rows process together: enough sums to hide the latency.
constexpr int byte_vectors(int64_t n) { return n <= 6 ? 4 : 2; }
static_assert(kTile % (4 * kLanes) == 0 && kMaxTileRows <= 12);

// Prefetch steps of load_keys and score_rows for n rows.
constexpr int64_t kTransposeSteps = 2;
inline int64_t load_steps(int64_t) { return kTransposeSteps * kTile / kLanes; }
inline int64_t score_steps(int64_t n, int64_t d) {
    return kTile / (byte_vectors(n) * kLanes) * 2 * (padded(d) / kQueryStep);
}

// sums[r, v] += the products of columns [i, i + 16) of each row's bytes with the keys at `keys`.
template <int c, int rows, int vectors>
inline __attribute__((always_inline)) void
byte_step(vi (&sums)[rows][vectors], const ByteGroup (&x)[rows], const std::byte *keys) {
    vb key[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
        key[v] = load_bytes(keys + (c * kTile + v * kLanes) * 4);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            sums[r][v] = dot<c, !kUnsignedWeights>(sums[r][v], key[v], x[r]);
        }
    }
}

template <int rows, int vectors, typename Q, typename F>
inline __attribute__((always_inline)) void byte_pass(vi (&sums)[rows][vectors], Q q, int64_t part,
                                                     const std::byte *keys, int64_t n, F fetch) {
    for (int64_t i = 0; i < n; i += kQueryStep, keys += kQueryStep * kTile) {
        fetch.step();
        ByteGroup x[rows];
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            x[r] = load_group(reinterpret_cast<const int8_t *>(q.row(r)) + part + i);
        }
        byte_step<0>(sums, x, keys);
        byte_step<1>(sums, x, keys);
        byte_step<2>(sums, x, keys);
        byte_step<3>(sums, x, keys);
    }
}

// scores[r, e] = q[r] . key e for `rows` rows and vectors * kLanes entries.
template <int rows, int vectors, typename Q, typename F>
void byte_tile(Q q, const std::byte *keys, const float *scales, int64_t n, float *scores, F fetch) {
    vi sums[rows][vectors];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            sums[r][v] = vi{};
        }
    }
    byte_pass(sums, q, 0, keys, n, fetch);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        QueryTail tail;
        __builtin_memcpy(&tail, reinterpret_cast<const char *>(q.row(r)) + 2 * n, sizeof tail);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            sums[r][v] = sub(start_sum_less<kQueryBase>(sums[r][v]), start_sum(tail.offset));
        }
    }
    byte_pass(sums, q, n, keys, n, fetch);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        QueryTail tail;
        __builtin_memcpy(&tail, reinterpret_cast<const char *>(q.row(r)) + 2 * n, sizeof tail);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) {
            const vf score = mul(to_float(sums[r][v]), set1(tail.scale));
            store(scores + r * kTile + v * kLanes, mul(score, load(scales + v * kLanes)));
        }
    }
}

template <int rows = kMaxTileRows, typename Q, typename F>
inline void byte_rows(int64_t m, Q q, const std::byte *keys, const float *scales, int64_t n,
                      float *scores, F fetch) {
    if constexpr (rows > 1) {
        if (m < rows) {
            return byte_rows<rows - 1>(m, q, keys, scales, n, scores, fetch);
        }
    }
    constexpr int vectors = byte_vectors(rows);
    for (int64_t e = 0; e < kTile; e += vectors * kLanes) {
        byte_tile<rows, vectors>(q, keys + 4 * e, scales + e, n, scores + e, fetch);
    }
}

// Quads [i, i + n) of kLanes keys, transposed, to rows i.. of out [d / 4, kTile].
template <typename Keys>
inline void transpose_quads(const Keys &keys, int64_t i, int64_t n, std::byte *out) {
    alignas(64) float some[kLanes * kLanes];
    vf transposed[kLanes];
    if (n == kLanes) {
        load_transposed(AsFloats<Keys>{keys}, i, transposed);
    } else {
        for (int j = 0; j < kLanes; ++j) {
            store(some + j * kLanes, load_some(AsFloats<Keys>{keys}.row(j) + i, n));
        }
        load_transposed(SpacedKeys<float>{some, kLanes}, 0, transposed);
    }
    out += i * kTile * 4;
#pragma GCC unroll 16
    for (int64_t j = 0; j < kLanes; ++j) {
        if (j < n) {
            store_bytes(out + j * kTile * 4, sub_bytes<-kByteOffset>(bytes_of(transposed[j])));
        }
    }
}

// keys [padded(d) / 4, kTile, 4] followed by the scales of the tile's entries [kTile]; undefined
// for absent entries. Columns from d on are multiplied by zeros.
inline void load_keys(const AttentionTask &task, const TilePlaces &places, float *keys,
                      TileFetch &fetch) {
    const int8_t *cache = static_cast<const int8_t *>(task.k_cache);
    std::byte *out = reinterpret_cast<std::byte *>(keys);
    const int64_t quads = (task.d + 3) / 4; // the last may include bytes of the scale
    for (int64_t e = 0; e < kTile; e += kLanes) {
        fetch.step(kTransposeSteps);
        const ListedKeys<int8_t> some = {cache, places.offset + e};
        for (int64_t i = 0; i < quads; i += kLanes) {
            transpose_quads(some, i, smaller(quads - i, kLanes), out + 4 * e);
        }
    }
    load_scales(cache, places, task.d, keys + padded(task.d) / 4 * kTile);
}

inline void score_rows(const AttentionTask &task, const TilePlaces &, const float *keys,
                       const RowTile &tile, float *scores, VectorRows &, TileFetch &fetch) {
    const float *q = task.q + tile.first * task.ldq;
    const int64_t width = padded(task.d);
    const auto score = [&](const auto &rows) {
        byte_rows(tile.n, rows, reinterpret_cast<const std::byte *>(keys), keys + width / 4 * kTile,
                  width, scores, SharedFetch{&fetch});
    };
    if (task.ldq == ops::cpu::kQueryStride) {
        score(FixedRows<ops::cpu::kQueryStride>{q});
    } else {
        score(StridedRows{q, task.ldq});
    }
}

// 16 bits, reduced so that a sum over d columns fits into 32.
inline void prepare_query(float *row, int64_t d) {
    const int64_t n = padded(d);
    alignas(64) int8_t parts[2][padded(ops::cpu::kMaxByteHead)];
    vf largest = zero();
    vf nothing = zero(); // NaN if any value is NaN or infinite
    for_vectors(d, [&](int64_t i, int64_t k) {
        const vf x = load_up_to(row + i, k);
        largest = max_num(max_num(x, sub(zero(), x)), largest);
        nothing = fma(x, zero(), nothing);
    });
    const float most = reduce_max(largest);
    const bool is_finite = reduce_add(nothing) == 0.0f;
    const bool is_small = most < 0x1p-100f;
    const float limit = float(127 * kQueryBase / (d <= ops::cpu::kMaxByteHead / 2 ? 1 : 2));
    const vf factor = set1(is_finite && !is_small ? limit / most : 0.0f);
    for_vectors(n, [&](int64_t i, int64_t) {
        const vf x = i + kLanes <= d ? load(row + i) : load_some(row + i, larger(d - i, 0));
        const vf steps = is_finite ? mul(x, factor) : zero();
        const vf high = to_float(round_to_int(mul(steps, set1(-1.0f / kQueryBase))));
        store(parts[0] + i, high);
        store(parts[1] + i, fma(high, set1(float(kQueryBase)), steps));
    });
    // Contribution of the key offset to every sum.
    alignas(64) int32_t sums[kLanes];
    vi sum[2] = {vi{}, vi{}};
    const vb key = sub_bytes<-kByteOffset>(bytes_of(zero()));
    for (int p = 0; p < 2; ++p) {
        for (int64_t i = 0; i < n; i += 4) {
            sum[p] = dot<0, !kUnsignedWeights>(sum[p], key, load_group(parts[p] + i));
        }
    }
    store_ints(sums, sub(sum[1], sub(start_sum(0), start_sum_less<kQueryBase>(sum[0]))));
    const QueryTail tail = {
        !is_finite ? __builtin_nanf("")
        : is_small ? 0.0f
                   : most / limit,
        kByteOffset == 0 ? 0 : sums[0],
    };
    char *out = reinterpret_cast<char *>(row);
    __builtin_memcpy(out, parts[0], size_t(n));
    __builtin_memcpy(out + n, parts[1], size_t(n));
    __builtin_memcpy(out + 2 * n, &tail, sizeof tail);
}

inline void prepare_queries(float *q, int64_t n, int64_t ldq, int64_t d) {
    for (int64_t r = 0; r < n; ++r) {
        prepare_query(q + r * ldq, d);
    }
}

} // namespace llaisys::LLAISYS_CPU_NS
