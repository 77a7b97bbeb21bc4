// Random queries over lists of a KV cache, and the naive reference of attention in double. To be included
// once.
#pragma once

#include "ops_reference.hpp"

#include "ops/attention/op.hpp"
#include "ops/cpu/prepared_attention.hpp"

namespace ops_test {

struct AttentionCase {
    Tensor q; // [n, heads, d]
    Tensor k; // [n_slots, kv_heads, d]
    Tensor v;
    int64_t value_dim = 0; // above 0: values are the first value_dim of each key, and v is k
    ops::AttentionLists lists;
    float scale;
    bool is_widened = false; // k and v are those of a cache in eight bits, in f32
};

inline int64_t slot_of(const ops::AttentionLists &lists, int64_t row, int64_t e) {
    const int64_t size = lists.block_size;
    const int32_t *table = lists.tables.as<int32_t>() + row * lists.tables.size(1);
    return table[e / size] * size + e % size;
}

// Whether kernels that add pairs of bf16 round scaled queries and weights.
inline bool rounds_to_bf16(const AttentionCase &c) {
    const int64_t d = c.q.size(2);
    const ops::cpu::PreparedAttention *pairs = ops::cpu::prepared_attention(kBf16, kBf16, d);
    const DType keys = c.is_widened ? LLAISYS_DTYPE_I8 : c.k.dtype();
    const DType values = c.is_widened ? LLAISYS_DTYPE_I8 : c.v.dtype();
    return pairs != nullptr && ops::cpu::prepared_attention(keys, values, d) == pairs;
}

inline void check_attention(const AttentionCase &c, const Tensor &out, double tolerance = 2e-5) {
    const bool is_rounded = rounds_to_bf16(c);
    const auto scaled = [&](double value) {
        const double exact = value * double(c.scale);
        return is_rounded ? double(to_f32(from_f32<bf16_t>(float(exact)))) : exact;
    };
    const int64_t heads = c.q.size(1);
    const int64_t d = c.q.size(2);
    const int64_t value_dim = out.size(2);
    const int64_t group = heads / c.k.size(1);
    for (int64_t i = 0; i < c.q.size(0); ++i) {
        const int64_t row = c.lists.q_rows.as<int32_t>()[i];
        const int64_t begin = c.lists.begin.as<int32_t>()[i];
        const int64_t end = c.lists.end.as<int32_t>()[i];
        for (int64_t h = 0; h < heads; ++h) {
            std::vector<double> weights;
            std::vector<double> sums(static_cast<size_t>(value_dim), 0.0);
            std::vector<double> sizes(static_cast<size_t>(value_dim), 0.0);
            double max = -kInf;
            double total = 0;
            for (int64_t e = begin; e < end; ++e) {
                double dot = 0;
                for (int64_t x = 0; x < d; ++x) {
                    dot += scaled(get3(c.q, i, h, x)) *
                           get3(c.k, slot_of(c.lists, row, e), h / group, x);
                }
                weights.push_back(dot);
                max = std::max(max, weights.back());
            }
            for (int64_t e = begin; e < end; ++e) {
                const double weight = std::exp(weights[size_t(e - begin)] - max);
                total += weight;
                for (int64_t x = 0; x < value_dim; ++x) {
                    const double value = get3(c.v, slot_of(c.lists, row, e), h / group, x);
                    sums[size_t(x)] += weight * value;
                    sizes[size_t(x)] += weight * std::abs(value);
                }
            }
            for (int64_t x = 0; x < value_dim; ++x) {
                const double expected = end > begin ? sums[size_t(x)] / total : 0.0;
                const double rounded = is_rounded && total > 0 ? sizes[size_t(x)] / total : 0;
                check_close("attention", get3(out, i, h, x), expected,
                            tolerance + 0x1p-8 * rounded +
                                unit_of(out.dtype()) * std::abs(expected));
            }
        }
    }
}

// n_seq lists of `length` entries in shuffled blocks; every list is asked by its last n_tokens.
inline AttentionCase attention_case(int64_t n_seq, int64_t length, int64_t n_tokens, int64_t heads,
                                    int64_t kv_heads, int64_t d, int32_t block_size, DType q_dtype,
                                    DType kv_dtype) {
    AttentionCase c;
    const int64_t width = (length + block_size - 1) / block_size + 1;
    const int64_t n_blocks = n_seq * width + 3;
    std::vector<int32_t> blocks(static_cast<size_t>(n_blocks));
    for (size_t i = 0; i < blocks.size(); ++i) {
        blocks[i] = int32_t(i);
    }
    std::shuffle(blocks.begin(), blocks.end(), generator());
    std::vector<int32_t> rows;
    std::vector<int32_t> begin;
    std::vector<int32_t> end;
    for (int64_t s = 0; s < n_seq; ++s) {
        for (int64_t t = 0; t < n_tokens; ++t) {
            rows.push_back(int32_t(s));
            begin.push_back(0);
            end.push_back(int32_t(length - n_tokens + t + 1));
        }
    }
    c.q = random_strided({n_seq * n_tokens, heads, d}, q_dtype, 2.0f);
    c.k = random_tensor({n_blocks * block_size, kv_heads, d}, kv_dtype);
    c.v = random_tensor({n_blocks * block_size, kv_heads, d}, kv_dtype);
    c.lists.q_rows = i32_tensor(rows);
    c.lists.begin = i32_tensor(begin);
    c.lists.end = i32_tensor(end);
    c.lists.tables = Tensor::create({n_seq, width}, kI32);
    std::copy(blocks.begin(), blocks.begin() + n_seq * width, c.lists.tables.as<int32_t>());
    c.lists.block_size = block_size;
    c.scale = 1.0f / std::sqrt(float(d));
    return c;
}

// Odd ones among them.
struct AttentionSizes {
    int64_t n_seq, length, n_tokens, heads, kv_heads, d;
    int32_t block_size;
};
constexpr AttentionSizes kAttentionSizes[] = {
    {1, 1, 1, 1, 1, 1, 1},     {2, 3, 3, 3, 3, 3, 1},     {1, 65, 1, 6, 2, 64, 16},
    {3, 33, 7, 9, 3, 64, 16},  {1, 130, 31, 4, 1, 33, 7}, {2, 64, 64, 2, 2, 80, 16},
    {1, 577, 2, 7, 1, 31, 16}, {1, 1100, 1, 2, 2, 16, 3}, {1, 70, 70, 14, 2, 128, 16},
};
inline AttentionCase attention_case(const AttentionSizes &s, DType q_dtype, DType kv_dtype) {
    return attention_case(s.n_seq, s.length, s.n_tokens, s.heads, s.kv_heads, s.d, s.block_size,
                          q_dtype, kv_dtype);
}

inline Tensor run_attention(const Stream &stream, const AttentionCase &c, DType out_dtype = kF32) {
    const int64_t value_dim = c.value_dim > 0 ? c.value_dim : c.q.size(2);
    const Tensor out = random_strided({c.q.size(0), c.q.size(1), value_dim}, out_dtype);
    const ops::KvLayer kv =
        c.value_dim > 0 ? ops::slot_major(c.k, c.value_dim) : ops::slot_major(c.k, c.v);
    ops::attention(stream, out, c.q, kv, c.lists, c.scale);
    return out;
}

// Tokens [first, last) of a case.
inline AttentionCase tokens_of(const AttentionCase &c, int64_t first, int64_t last) {
    AttentionCase some = c;
    some.q = c.q.slice(0, first, last);
    some.lists.q_rows = c.lists.q_rows.slice(0, first, last);
    some.lists.begin = c.lists.begin.slice(0, first, last);
    some.lists.end = c.lists.end.slice(0, first, last);
    return some;
}

// The same lists entry by entry: blocks of one.
inline AttentionCase with_cells(const AttentionCase &c) {
    AttentionCase cells = c;
    const int64_t rows = c.lists.tables.size(0);
    const int64_t width = c.lists.tables.size(1) * c.lists.block_size;
    cells.lists.tables = Tensor::create({rows, width}, kI32);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t e = 0; e < width; ++e) {
            cells.lists.tables.as<int32_t>()[r * width + e] = int32_t(slot_of(c.lists, r, e));
        }
    }
    cells.lists.block_size = 1;
    return cells;
}

// A token gets the same bits on any number of threads, in blocks or cells, in any batch.
inline void check_any_batch(const AttentionCase &c) {
    const int64_t n = c.q.size(0);
    const Tensor whole = run_attention(one_thread(), c);
    for (int s = 0; s < 3; ++s) {
        CHECK(same_bits(run_attention(*all_streams()[s], c), whole));
        CHECK(same_bits(run_attention(*all_streams()[s], with_cells(c)), whole));
    }
    for (int64_t first = 0; first < n;) {
        const int64_t last = std::min(n, first + random_int(1, 40));
        const Tensor some = run_attention(*all_streams()[first % 3], tokens_of(c, first, last));
        CHECK(same_bits(some, whole.slice(0, first, last)));
        first = last;
    }
    for (int64_t i = 0; i < n; i += 5) {
        const Tensor one = run_attention(*all_streams()[i % 3], tokens_of(c, i, i + 1));
        CHECK(same_bits(one, whole.slice(0, i, i + 1)));
    }
}

} // namespace ops_test
