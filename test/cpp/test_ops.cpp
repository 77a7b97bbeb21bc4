// Every operator against a naive twin in double, on every instruction set of this machine: odd
// sizes, strided views, mixed dtypes, bit equality across row counts, batches and threads. One long
// file, because the twins share their helpers.
#include "check.hpp"

#include "ops/add/op.hpp"
#include "ops/argmax/op.hpp"
#include "ops/attention/op.hpp"
#include "ops/cpu/kernels.hpp"
#include "ops/embedding/op.hpp"
#include "ops/kv_store/op.hpp"
#include "ops/linear/op.hpp"
#include "ops/rearrange/op.hpp"
#include "ops/rms_norm/op.hpp"
#include "ops/rope/op.hpp"
#include "ops/self_attention_masked/op.hpp"
#include "ops/softmax/op.hpp"
#include "ops/swiglu/op.hpp"
#include "ops/topk/op.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

using namespace llaisys;
using device::Isa;
using device::Stream;

namespace {

constexpr DType kF32 = LLAISYS_DTYPE_F32;
constexpr DType kF16 = LLAISYS_DTYPE_F16;
constexpr DType kBf16 = LLAISYS_DTYPE_BF16;
constexpr DType kI32 = LLAISYS_DTYPE_I32;
constexpr DType kI64 = LLAISYS_DTYPE_I64;
constexpr DType kReal[] = {kF32, kF16, kBf16};
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::mt19937 &generator() {
    static std::mt19937 engine(20261115);
    return engine;
}

int64_t random_int(int64_t low, int64_t high) { // inclusive
    return std::uniform_int_distribution<int64_t>(low, high)(generator());
}

Stream &one_thread() {
    static Stream stream(LLAISYS_DEVICE_CPU, 0, 1);
    return stream;
}
Stream &two_threads() {
    static Stream stream(LLAISYS_DEVICE_CPU, 0, 2);
    return stream;
}
Stream &three_threads() {
    static Stream stream(LLAISYS_DEVICE_CPU, 0, 3);
    return stream;
}
Stream *const *all_streams() {
    static Stream *const streams[] = {&one_thread(), &two_threads(), &three_threads()};
    return streams;
}

// Runs body once for each instruction set that this machine has.
template <typename Body> void for_each_isa(const Body &body) {
    for (Isa isa : {Isa::portable, Isa::neon, Isa::avx2, Isa::avx512}) {
        if (ops::cpu::use_kernels_of(isa)) {
            const int before = check::failures();
            body();
            if (check::failures() != before) {
                std::fprintf(stderr, "  ... with the kernels for %s\n", device::name_of(isa));
            }
        }
    }
    ops::cpu::use_kernels_of(device::cpu_isa());
}

// ---- tensors --------------------------------------------------------------------------------

double get(const Tensor &tensor, int64_t offset) {
    return visit_real(tensor.dtype(), [&](auto type) {
        return double(to_f32(tensor.as<decltype(type)>()[offset]));
    });
}
double get2(const Tensor &t, int64_t i, int64_t j) {
    return get(t, i * t.stride(0) + j * t.stride(1));
}
double get3(const Tensor &t, int64_t i, int64_t j, int64_t k) {
    return get(t, i * t.stride(0) + j * t.stride(1) + k * t.stride(2));
}
void set(const Tensor &tensor, int64_t offset, float value) {
    visit_real(tensor.dtype(), [&](auto type) {
        using T = decltype(type);
        tensor.as<T>()[offset] = from_f32<T>(value);
    });
}

Tensor random_tensor(const Shape &shape, DType dtype, float range = 1.0f) {
    Tensor tensor = Tensor::create(shape, dtype);
    std::uniform_real_distribution<float> values(-range, range);
    for (int64_t i = 0; i < tensor.elements(); ++i) {
        set(tensor, i, values(generator()));
    }
    return tensor;
}

// The same shape seen inside a larger tensor: the first dimension is padded, and starts at an
// address that no vector is aligned to.
Tensor random_strided(const Shape &shape, DType dtype, float range = 1.0f) {
    Shape padded = shape;
    const int last = shape.ndim() - 1;
    padded[last] += 5;
    return random_tensor(padded, dtype, range).slice(last, 3, 3 + shape[last]);
}

Tensor i32_tensor(const std::vector<int32_t> &values) {
    Tensor tensor = Tensor::create({int64_t(values.size())}, kI32);
    std::copy(values.begin(), values.end(), tensor.as<int32_t>());
    return tensor;
}
Tensor i64_tensor(const std::vector<int64_t> &values) {
    Tensor tensor = Tensor::create({int64_t(values.size())}, kI64);
    std::copy(values.begin(), values.end(), tensor.as<int64_t>());
    return tensor;
}

// Error that rounding to the dtype may add.
double unit_of(DType dtype) {
    return dtype == kF32 ? 1e-6 : dtype == kF16 ? 1.0 / 1024 : 1.0 / 128;
}

void check_close(const char *what, double got, double expected, double tolerance) {
    const bool both_nan = std::isnan(got) && std::isnan(expected);
    if (!both_nan && !(got == expected) && !(std::abs(got - expected) <= tolerance)) {
        check::report(__FILE__, __LINE__,
                      text(what, ": got ", got, ", expected ", expected, " within ", tolerance));
    }
}

bool same_bits(const Tensor &a, const Tensor &b) {
    const Tensor x = a.contiguous();
    const Tensor y = b.contiguous();
    return x.bytes() == y.bytes() && std::memcmp(x.data(), y.data(), size_t(x.bytes())) == 0;
}

// ---- linear ---------------------------------------------------------------------------------

struct LinearCase {
    Tensor in;
    Tensor weight;
    Tensor bias; // may be undefined
};

Tensor run_linear(const Stream &stream, const LinearCase &c, DType out_dtype,
                  const Tensor *rows = nullptr) {
    const ops::LinearWeight packed = ops::LinearWeight::pack(stream, c.weight);
    const int64_t m = rows != nullptr ? rows->size(0) : c.in.size(0);
    const Tensor out = random_strided({m, c.weight.size(0)}, out_dtype);
    const ops::LinearPart part = {&packed, c.bias.defined() ? &c.bias : nullptr, &out};
    ops::linear(stream, c.in, &part, 1, rows);
    return out;
}

void check_linear(const LinearCase &c, const Tensor &out, const int32_t *rows) {
    for (int64_t i = 0; i < out.size(0); ++i) {
        const int64_t row = rows != nullptr ? rows[i] : i;
        for (int64_t j = 0; j < out.size(1); ++j) {
            double sum = 0;
            double size = 0;
            for (int64_t k = 0; k < c.in.size(1); ++k) {
                const double product = get2(c.in, row, k) * get2(c.weight, j, k);
                sum += product;
                size += std::abs(product);
            }
            sum += c.bias.defined() ? get(c.bias, j) : 0.0;
            check_close("linear", get2(out, i, j), sum,
                        1e-6 * size + unit_of(out.dtype()) * (std::abs(sum) + 1e-3));
        }
    }
}

} // namespace

TEST(linear_matches_twin_over_odd_sizes) {
    for_each_isa([] {
        for (int64_t n : {1, 3, 31, 33, 65}) {
            for (int64_t k : {1, 3, 7, 65, 577}) {
                for (int64_t m : {1, 2, 3, 7, 13, 31}) {
                    LinearCase c = {random_strided({m, k}, kF32), random_tensor({n, k}, kBf16), {}};
                    check_linear(c, run_linear(two_threads(), c, kF32), nullptr);
                }
            }
        }
        LinearCase none = {random_tensor({0, 7}, kF32), random_tensor({5, 7}, kF32), {}};
        CHECK_EQ(run_linear(two_threads(), none, kF32).size(0), 0);
    });
}

TEST(linear_takes_every_dtype_of_every_argument) {
    for_each_isa([] {
        for (DType in : kReal) {
            for (DType weight : kReal) {
                for (DType bias : kReal) {
                    for (DType out : kReal) {
                        LinearCase c = {random_strided({5, 33}, in),
                                        random_strided({37, 33}, weight),
                                        random_tensor({37}, bias)};
                        check_linear(c, run_linear(one_thread(), c, out), nullptr);
                    }
                }
            }
        }
    });
}

TEST(linear_selects_rows) {
    for_each_isa([] {
        for (DType in : kReal) {
            LinearCase c = {random_strided({9, 70}, in), random_tensor({40, 70}, kF16),
                            random_tensor({40}, kF32)};
            for (const auto &rows : {std::vector<int32_t>{8}, {3, 3, 0, 8, 1}, {}}) {
                const Tensor index = i32_tensor(rows);
                check_linear(c, run_linear(two_threads(), c, kF32, &index), rows.data());
            }
        }
    });
}

TEST(linear_rows_gives_back_the_rows_before_packing) {
    for_each_isa([] {
        for (DType dtype : kReal) {
            const Tensor weight = random_tensor({67, 35}, dtype, 5);
            const ops::LinearWeight packed = ops::LinearWeight::pack(two_threads(), weight);
            const std::vector<int64_t> index = {0, 66, 31, 32, 15, 16, 66};
            const Tensor out = Tensor::create({7, 35}, LLAISYS_DTYPE_F32);
            ops::linear_rows(two_threads(), out, i64_tensor(index), packed);
            for (int64_t i = 0; i < 7; ++i) {
                for (int64_t j = 0; j < 35; ++j) {
                    CHECK_EQ(get(out, i * 35 + j), get(weight, index[size_t(i)] * 35 + j));
                }
            }
            CHECK_THROWS(
                ops::linear_rows(two_threads(), out, i64_tensor({0, 1, 2, 3, 4, 5, 67}), packed),
                "linear_rows", "index", "67");
        }
    });
}

TEST(linear_runs_several_parts_in_one_call) {
    for_each_isa([] {
        const Tensor in = random_tensor({3, 96}, kF32);
        const Tensor w[3] = {random_tensor({96, 96}, kBf16), random_tensor({33, 96}, kF16),
                             random_tensor({1, 96}, kF32)};
        const Tensor bias = random_tensor({33}, kBf16);
        ops::LinearWeight packed[3];
        Tensor out[3];
        ops::LinearPart parts[3];
        for (int p = 0; p < 3; ++p) {
            packed[p] = ops::LinearWeight::pack(two_threads(), w[p]);
            out[p] = Tensor::create({3, w[p].size(0)}, kF32);
            parts[p] = {&packed[p], p == 1 ? &bias : nullptr, &out[p]};
        }
        ops::linear(two_threads(), in, parts, 3);
        for (int p = 0; p < 3; ++p) {
            check_linear({in, w[p], p == 1 ? bias : Tensor()}, out[p], nullptr);
        }
    });
}

TEST(linear_gives_a_row_the_same_bits_in_any_company) {
    for_each_isa([] {
        for (DType dtype : kReal) {
            const int64_t k = random_int(500, 600);
            const int64_t n = random_int(60, 100);
            LinearCase c = {random_tensor({300, k}, kF32), random_tensor({n, k}, dtype),
                            random_tensor({n}, kF32)};
            std::vector<Tensor> alone;
            for (int64_t i = 0; i < 300; ++i) {
                LinearCase one = {c.in.slice(0, i, i + 1), c.weight, c.bias};
                alone.push_back(i < 70 || i > 290 ? run_linear(one_thread(), one, kF32) : Tensor());
            }
            for (int64_t m = 1; m <= 300; m = m < 70 ? m + 1 : m + 115) {
                LinearCase some = {c.in.slice(0, 0, m), c.weight, c.bias};
                const Tensor out = run_linear(*all_streams()[m % 3], some, kF32);
                for (int64_t i = 0; i < m; ++i) {
                    CHECK(!alone[size_t(i)].defined() ||
                          same_bits(out.slice(0, i, i + 1), alone[size_t(i)]));
                }
            }
            std::vector<int32_t> order;
            for (int i = 69; i >= 0; --i) {
                order.push_back((i * 37) % 70);
            }
            const Tensor rows = i32_tensor(order);
            for (int s = 0; s < 3; ++s) {
                const Tensor out = run_linear(*all_streams()[s], c, kF32, &rows);
                for (int64_t i = 0; i < 70; ++i) {
                    CHECK(same_bits(out.slice(0, i, i + 1), alone[size_t(order[size_t(i)])]));
                }
            }
        }
    });
}

TEST(linear_splits_large_products) {
    for_each_isa([] {
        LinearCase c = {random_tensor({2, 1024}, kF32), random_tensor({1500, 1024}, kBf16), {}};
        check_linear(c, run_linear(three_threads(), c, kF32), nullptr);
        LinearCase rows = {random_tensor({20, 1024}, kF32), random_tensor({100, 1024}, kBf16), {}};
        check_linear(rows, run_linear(three_threads(), rows, kF32), nullptr);
    });
}

TEST(linear_rejects_bad_arguments) {
    const Stream &s = one_thread();
    const ops::LinearWeight w = ops::LinearWeight::pack(s, random_tensor({4, 6}, kF32));
    const Tensor in = random_tensor({2, 6}, kF32);
    const Tensor out = Tensor::create({2, 4}, kF32);
    const Tensor bias = Tensor::create({3}, kF32);
    const Tensor narrow = random_tensor({2, 5}, kF32);
    const Tensor short_out = Tensor::create({1, 4}, kF32);
    const Tensor rows = i32_tensor({0, 2});
    const ops::LinearWeight undefined;
    ops::LinearPart part = {&w, nullptr, &out};
    CHECK_THROWS(ops::linear(s, narrow, &part, 1), "linear", "in", "5", "6");
    CHECK_THROWS(ops::linear(s, in, &part, 1, &rows), "linear", "rows", "2");
    CHECK_THROWS(ops::linear(s, i32_tensor({1}), &part, 1), "linear", "in", "i32", "f32");
    part = {&w, &bias, &out};
    CHECK_THROWS(ops::linear(s, in, &part, 1), "linear", "bias", "[3]", "[4]");
    part = {&w, nullptr, &short_out};
    CHECK_THROWS(ops::linear(s, in, &part, 1), "linear", "out", "[1, 4]", "[2, 4]");
    part = {&undefined, nullptr, &out};
    CHECK_THROWS(ops::linear(s, in, &part, 1), "linear", "weight");
    CHECK_THROWS(ops::LinearWeight::pack(s, i32_tensor({1})), "linear_weight", "weight", "i32");
    CHECK_THROWS(ops::LinearWeight::pack(s, Tensor()), "linear_weight", "weight");
}

// ---- attention ------------------------------------------------------------------------------

namespace {

struct AttentionCase {
    Tensor q; // [n, heads, d]
    Tensor k; // [n_slots, kv_heads, d]
    Tensor v;
    ops::AttentionLists lists;
    float scale;
};

int64_t slot_of(const ops::AttentionLists &lists, int64_t row, int64_t e) {
    const int64_t size = lists.block_size;
    const int32_t *table = lists.tables.as<int32_t>() + row * lists.tables.size(1);
    return table[e / size] * size + e % size;
}

void check_attention(const AttentionCase &c, const Tensor &out) {
    const int64_t heads = c.q.size(1);
    const int64_t d = c.q.size(2);
    const int64_t group = heads / c.k.size(1);
    for (int64_t i = 0; i < c.q.size(0); ++i) {
        const int64_t row = c.lists.q_rows.as<int32_t>()[i];
        const int64_t begin = c.lists.begin.as<int32_t>()[i];
        const int64_t end = c.lists.end.as<int32_t>()[i];
        for (int64_t h = 0; h < heads; ++h) {
            std::vector<double> weights;
            std::vector<double> sums(static_cast<size_t>(d), 0.0);
            double max = -kInf;
            double total = 0;
            for (int64_t e = begin; e < end; ++e) {
                double dot = 0;
                for (int64_t x = 0; x < d; ++x) {
                    dot += get3(c.q, i, h, x) * get3(c.k, slot_of(c.lists, row, e), h / group, x);
                }
                weights.push_back(dot * double(c.scale));
                max = std::max(max, weights.back());
            }
            for (int64_t e = begin; e < end; ++e) {
                const double weight = std::exp(weights[size_t(e - begin)] - max);
                total += weight;
                for (int64_t x = 0; x < d; ++x) {
                    sums[size_t(x)] += weight * get3(c.v, slot_of(c.lists, row, e), h / group, x);
                }
            }
            for (int64_t x = 0; x < d; ++x) {
                const double expected = end > begin ? sums[size_t(x)] / total : 0.0;
                check_close("attention", get3(out, i, h, x), expected,
                            2e-5 + unit_of(out.dtype()) * std::abs(expected));
            }
        }
    }
}

// n_seq lists of `length` entries in shuffled blocks; every list is asked by its last n_tokens.
AttentionCase attention_case(int64_t n_seq, int64_t length, int64_t n_tokens, int64_t heads,
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

Tensor run_attention(const Stream &stream, const AttentionCase &c, DType out_dtype = kF32) {
    const Tensor out = random_strided(c.q.shape(), out_dtype);
    ops::attention(stream, out, c.q, c.k, c.v, c.lists, c.scale);
    return out;
}

// Tokens [first, last) of a case.
AttentionCase tokens_of(const AttentionCase &c, int64_t first, int64_t last) {
    AttentionCase some = c;
    some.q = c.q.slice(0, first, last);
    some.lists.q_rows = c.lists.q_rows.slice(0, first, last);
    some.lists.begin = c.lists.begin.slice(0, first, last);
    some.lists.end = c.lists.end.slice(0, first, last);
    return some;
}

// The same lists entry by entry: blocks of one.
AttentionCase with_cells(const AttentionCase &c) {
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

} // namespace

TEST(attention_matches_twin_over_odd_sizes) {
    for_each_isa([] {
        const struct {
            int64_t n_seq, length, n_tokens, heads, kv_heads, d;
            int32_t block_size;
        } cases[] = {
            {1, 1, 1, 1, 1, 1, 1},     {2, 3, 3, 3, 3, 3, 1},     {1, 65, 1, 6, 2, 64, 16},
            {3, 33, 7, 9, 3, 64, 16},  {1, 130, 31, 4, 1, 33, 7}, {2, 64, 64, 2, 2, 80, 16},
            {1, 577, 2, 7, 1, 31, 16}, {1, 1100, 1, 2, 2, 16, 3}, {1, 70, 70, 14, 2, 128, 16},
        };
        for (const auto &s : cases) {
            AttentionCase c = attention_case(s.n_seq, s.length, s.n_tokens, s.heads, s.kv_heads,
                                             s.d, s.block_size, kF32, kBf16);
            check_attention(c, run_attention(two_threads(), c));
        }
    });
}

TEST(attention_takes_every_dtype_of_every_argument) {
    for_each_isa([] {
        for (DType q : kReal) {
            for (DType k : kReal) {
                for (DType v : kReal) {
                    for (DType out : kReal) {
                        AttentionCase c = attention_case(2, 19, 3, 4, 2, 20, 4, q, k);
                        c.v = random_tensor(c.k.shape(), v);
                        check_attention(c, run_attention(one_thread(), c, out));
                    }
                }
            }
        }
    });
}

TEST(attention_sees_windows_and_nothing) {
    for_each_isa([] {
        AttentionCase c = attention_case(1, 700, 40, 4, 2, 16, 16, kF32, kF32);
        for (int64_t i = 0; i < 40; ++i) {
            int32_t *end = c.lists.end.as<int32_t>();
            c.lists.begin.as<int32_t>()[i] = i % 7 == 3 ? end[i] : int32_t(random_int(0, end[i]));
        }
        check_attention(c, run_attention(two_threads(), c));
        for (int64_t i = 0; i < 40; ++i) {
            c.lists.end.as<int32_t>()[i] = 0;
        }
        const Tensor nothing = run_attention(two_threads(), c);
        CHECK(same_bits(nothing, Tensor::create(nothing.shape(), kF32)));
    });
}

TEST(attention_never_reads_what_a_token_does_not_see) {
    for_each_isa([] {
        AttentionCase c = attention_case(1, 100, 30, 4, 2, 16, 16, kF32, kF32);
        const Tensor out = run_attention(one_thread(), c);
        for (int64_t e = 85; e < 100; ++e) { // entries from 85 on: seen by tokens 15.. only
            for (int64_t x = 0; x < 2 * 16; ++x) {
                set(c.k, slot_of(c.lists, 0, e) * 32 + x, kNan);
                set(c.v, slot_of(c.lists, 0, e) * 32 + x, kInf);
            }
        }
        const Tensor again = run_attention(one_thread(), c);
        CHECK(same_bits(out.slice(0, 0, 15), again.slice(0, 0, 15)));
    });
}

TEST(attention_gives_a_token_the_same_bits_in_any_company) {
    for_each_isa([] {
        for (DType kv : kReal) {
            const int64_t d = kv == kF16 ? 24 : 64; // in whole panels or not
            const AttentionCase c = attention_case(3, 1100, 37, 6, 2, d, 16, kF32, kv);
            const Tensor whole = run_attention(one_thread(), c);
            for (int s = 0; s < 3; ++s) {
                CHECK(same_bits(run_attention(*all_streams()[s], c), whole));
                CHECK(same_bits(run_attention(*all_streams()[s], with_cells(c)), whole));
            }
            for (int64_t first = 0; first < 3 * 37;) {
                const int64_t last = std::min<int64_t>(3 * 37, first + random_int(1, 40));
                const Tensor some =
                    run_attention(*all_streams()[first % 3], tokens_of(c, first, last));
                CHECK(same_bits(some, whole.slice(0, first, last)));
                first = last;
            }
            for (int64_t i = 0; i < 3 * 37; i += 5) {
                const Tensor one = run_attention(*all_streams()[i % 3], tokens_of(c, i, i + 1));
                CHECK(same_bits(one, whole.slice(0, i, i + 1)));
            }
        }
    });
}

TEST(attention_rejects_bad_arguments) {
    const Stream &s = one_thread();
    const AttentionCase good = attention_case(2, 20, 2, 4, 2, 8, 4, kF32, kF32);
    const Tensor out = Tensor::create({4, 4, 8}, kF32);
    const auto run = [&](const AttentionCase &c) {
        ops::attention(s, out, c.q, c.k, c.v, c.lists, c.scale);
    };
    AttentionCase c = good;
    c.q = random_tensor({4, 3, 8}, kF32);
    CHECK_THROWS(run(c), "attention", "out");
    c = good;
    c.v = random_tensor({3, 2, 8}, kF32);
    CHECK_THROWS(run(c), "attention", "v_cache", "[3, 2, 8]");
    c = good;
    c.lists.q_rows = i32_tensor({0, 0, 2, 1});
    CHECK_THROWS(run(c), "attention", "q_rows", "2");
    c = good;
    c.lists.begin = i32_tensor({0, -1, 0, 0});
    CHECK_THROWS(run(c), "attention", "begin", "-1");
    c = good;
    c.lists.end = i32_tensor({1, 1, 1, 1000});
    CHECK_THROWS(run(c), "attention", "end", "1000");
    c = good;
    c.lists.tables = Tensor::create({2, 6}, kI32);
    c.lists.tables.as<int32_t>()[8] = 1 << 20;
    CHECK_THROWS(run(c), "attention", "tables", "1048576");
    c = good;
    c.lists.block_size = 0;
    CHECK_THROWS(run(c), "attention", "block_size", "0");
    c = good;
    c.lists.end = i32_tensor({1});
    CHECK_THROWS(run(c), "attention", "end", "[1]", "[4]");
}

TEST(masked_attention_matches_twin) {
    for_each_isa([] {
        for (int kind = 0; kind < 3; ++kind) { // causal, random, nothing
            const int64_t n = 21;
            const int64_t m = 70;
            AttentionCase c;
            c.q = random_tensor({n, 6, 20}, kF32);
            c.k = random_tensor({m, 2, 20}, kF16);
            c.v = random_tensor({m, 2, 20}, kF16);
            c.scale = 0.3f;
            const Tensor mask = Tensor::create({n, m}, LLAISYS_DTYPE_U8);
            std::vector<int32_t> rows;
            std::vector<int32_t> ends;
            c.lists.tables = Tensor::create({n, m}, kI32);
            for (int64_t i = 0; i < n; ++i) {
                int32_t count = 0;
                for (int64_t j = 0; j < m; ++j) {
                    const bool seen =
                        kind == 0 ? j <= i + m - n : kind == 1 && random_int(0, 2) == 0;
                    mask.as<uint8_t>()[i * m + j] = seen ? 7 : 0;
                    if (seen) {
                        c.lists.tables.as<int32_t>()[i * m + count++] = int32_t(j);
                    }
                }
                rows.push_back(int32_t(i));
                ends.push_back(count);
            }
            c.lists.q_rows = i32_tensor(rows);
            c.lists.begin = Tensor::create({n}, kI32);
            c.lists.end = i32_tensor(ends);
            const Tensor out = Tensor::create(c.q.shape(), kF32);
            ops::self_attention_masked(two_threads(), out, c.q, c.k, c.v, mask, c.scale);
            check_attention(c, out);
        }
    });
    const Tensor q = random_tensor({2, 2, 4}, kF32);
    const Tensor mask = Tensor::create({2, 3}, LLAISYS_DTYPE_U8);
    CHECK_THROWS(ops::self_attention_masked(one_thread(), q, q, q, q, mask, 1.0f),
                 "self_attention_masked", "mask", "[2, 3]", "[2, 2]");
}

// ---- the rest -------------------------------------------------------------------------------

TEST(add_matches_twin) {
    for_each_isa([] {
        for (DType dtype : kReal) {
            for (int64_t n : {1, 7, 33, 577, 70001}) {
                const Tensor a = random_tensor({n}, dtype);
                const Tensor b = random_tensor({n}, dtype);
                const Tensor out = Tensor::create({n}, dtype);
                ops::add(two_threads(), out, a, b);
                for (int64_t i = 0; i < n; ++i) {
                    const double expected = get(a, i) + get(b, i);
                    check_close("add", get(out, i), expected, unit_of(dtype) * std::abs(expected));
                }
                ops::add(two_threads(), a, a, b); // in place
                CHECK(same_bits(a, out));
            }
        }
    });
    const Stream &s = one_thread();
    const Tensor a = Tensor::create({4}, kF32);
    CHECK_THROWS(ops::add(s, a, a, Tensor::create({5}, kF32)), "add", "b", "[5]", "[4]");
    CHECK_THROWS(ops::add(s, a, Tensor::create({4}, kF16), a), "add", "a", "f16", "f32");
    CHECK_THROWS(ops::add(s, a, Tensor(), a), "add", "a");
    const Tensor wide = Tensor::create({4, 4}, kF32);
    CHECK_THROWS(ops::add(s, wide.slice(1, 0, 2), wide, wide), "add", "out", "contiguous");
}

TEST(argmax_takes_the_first_of_the_largest) {
    for_each_isa([] {
        for (DType dtype : kReal) {
            for (int64_t n : {1, 3, 31, 33, 577, 1500}) {
                const int64_t rows = 9;
                const Tensor values = random_tensor({rows, n}, dtype);
                for (int64_t j = 0; j < n; ++j) {
                    set(values, 1 * n + j, kNan);
                    set(values, 2 * n + j, -kInf);
                    set(values, 3 * n + j, j % 3 == 0 ? kNan : float(j % 5));
                    set(values, 4 * n + j, -kInf);
                    set(values, 5 * n + j, j + 1 == n ? -kInf : kNan);
                }
                set(values, 6 * n + n / 2, kInf);
                set(values, 6 * n + n - 1, kInf);
                const Tensor index = Tensor::create({rows}, kI64);
                const Tensor value = Tensor::create({rows}, dtype);
                ops::argmax(two_threads(), index, value, values);
                for (int64_t r = 0; r < rows; ++r) {
                    int64_t best = -1;
                    for (int64_t j = 0; j < n; ++j) {
                        const double x = get(values, r * n + j);
                        if (!std::isnan(x) && (best < 0 || x > get(values, r * n + best))) {
                            best = j;
                        }
                    }
                    best = std::max<int64_t>(best, 0);
                    CHECK_EQ(index.as<int64_t>()[r], best);
                    check_close("argmax", get(value, r), get(values, r * n + best), 0);
                }
            }
        }
    });
    const Tensor values = Tensor::create({2, 3}, kF32);
    const Tensor index = Tensor::create({2}, kI64);
    const Tensor value = Tensor::create({2}, kF32);
    const Stream &s = one_thread();
    CHECK_THROWS(ops::argmax(s, value, value, values), "argmax", "max_index", "f32", "i64");
    CHECK_THROWS(ops::argmax(s, index, Tensor::create({2}, kF16), values), "argmax", "max_value");
    CHECK_THROWS(ops::argmax(s, index, value, Tensor::create({2, 0}, kF32)), "argmax", "values");
}

TEST(embedding_copies_and_converts_rows) {
    for_each_isa([] {
        for (DType table_dtype : kReal) {
            for (DType out_dtype : kReal) {
                const Tensor table = random_tensor({11, 577}, table_dtype);
                const std::vector<int64_t> index = {10, 0, 3, 3, 7};
                const Tensor out = Tensor::create({5, 577}, out_dtype);
                ops::embedding(two_threads(), out, i64_tensor(index), table);
                for (int64_t i = 0; i < 5; ++i) {
                    for (int64_t j = 0; j < 577; ++j) {
                        const double x = get(table, index[size_t(i)] * 577 + j);
                        const double tolerance = out_dtype == table_dtype ? 0 : unit_of(out_dtype);
                        check_close("embedding", get(out, i * 577 + j), x,
                                    tolerance * std::abs(x) + (tolerance > 0 ? 1e-7 : 0));
                    }
                }
            }
        }
    });
    const Stream &s = one_thread();
    const Tensor table = random_tensor({4, 3}, kF32);
    const Tensor out = Tensor::create({1, 3}, kF32);
    CHECK_THROWS(ops::embedding(s, out, i64_tensor({4}), table), "embedding", "index", "4");
    CHECK_THROWS(ops::embedding(s, out, i64_tensor({-1}), table), "embedding", "index", "-1");
    CHECK_THROWS(ops::embedding(s, out, i32_tensor({0}), table), "embedding", "index", "i32");
}

TEST(rms_norm_matches_twin) {
    for_each_isa([] {
        for (DType in_dtype : kReal) {
            for (DType out_dtype : kReal) {
                for (DType weight_dtype : kReal) {
                    for (int64_t d : {1, 7, 65, 577, 1031}) {
                        const Tensor in = random_strided({3, d}, in_dtype, 3.0f);
                        const Tensor weight = random_tensor({d}, weight_dtype);
                        const Tensor out = random_strided({3, d}, out_dtype);
                        const Tensor residual = random_strided({3, d}, kF32);
                        const Tensor sum = Tensor::create({3, d}, kF32);
                        const auto verify = [&](const Tensor &got, const Tensor &x) {
                            for (int64_t i = 0; i < 3; ++i) {
                                double squares = 0;
                                for (int64_t j = 0; j < d; ++j) {
                                    squares += get2(x, i, j) * get2(x, i, j);
                                }
                                const double rms = std::sqrt(squares / double(d) + 1e-5);
                                for (int64_t j = 0; j < d; ++j) {
                                    const double y = get2(x, i, j) / rms * get(weight, j);
                                    check_close("rms_norm", get2(got, i, j), y,
                                                2 * unit_of(out_dtype) * std::abs(y) + 1e-6);
                                }
                            }
                        };
                        ops::rms_norm(two_threads(), out, in, weight, 1e-5f);
                        verify(out, in);
                        for (int64_t i = 0; i < 3 * d; ++i) {
                            set(sum, i,
                                float(get2(in, i / d, i % d)) +
                                    float(get2(residual, i / d, i % d)));
                        }
                        ops::add_rms_norm(two_threads(), out, residual, in, weight, 1e-5f);
                        CHECK(same_bits(residual, sum));
                        verify(out, residual);
                    }
                }
            }
        }
    });
    const Stream &s = one_thread();
    const Tensor x = random_tensor({2, 4}, kF32);
    CHECK_THROWS(ops::rms_norm(s, x, x, Tensor::create({5}, kF32), 0.0f), "rms_norm", "weight",
                 "[5]", "[4]");
    CHECK_THROWS(ops::add_rms_norm(s, x, Tensor::create({2, 5}, kF32), x, x, 0.0f), "add_rms_norm",
                 "residual", "[2, 5]");
    const int order[] = {1, 0};
    CHECK_THROWS(ops::rms_norm(s, x.permute(order), x.permute(order), x, 0.0f), "rms_norm", "in",
                 "dense");
}

TEST(rms_norm_and_swiglu_work_in_place) {
    for_each_isa([] {
        for (DType dtype : kReal) {
            const Tensor x = random_tensor({3, 577}, dtype);
            const Tensor up = random_tensor({3, 577}, dtype);
            const Tensor weight = random_tensor({577}, kF32);
            const Tensor out = Tensor::create({3, 577}, dtype);
            ops::swiglu(one_thread(), out, x, up);
            ops::swiglu(one_thread(), up, x, up);
            CHECK(same_bits(out, up));
            ops::rms_norm(one_thread(), out, x, weight, 1e-6f);
            ops::rms_norm(one_thread(), x, x, weight, 1e-6f);
            CHECK(same_bits(out, x));
        }
    });
}

TEST(rope_matches_twin_at_small_and_large_positions) {
    for_each_isa([] {
        for (DType in_dtype : kReal) {
            for (DType out_dtype : kReal) {
                for (int64_t d : {2, 6, 64, 80, 320}) {
                    const std::vector<int64_t> positions = {0, 1, 5, 4095, 131071, 1000000};
                    const int64_t n = int64_t(positions.size());
                    const Tensor in = random_strided({n, 3, d}, in_dtype);
                    const Tensor out = random_strided({n, 3, d}, out_dtype);
                    const Tensor inv_freq = Tensor::create({d / 2}, kF32);
                    for (int64_t i = 0; i < d / 2; ++i) {
                        set(inv_freq, i, float(std::pow(10000.0, -2.0 * double(i) / double(d))));
                    }
                    ops::rope(two_threads(), out, in, i64_tensor(positions), inv_freq);
                    for (int64_t i = 0; i < n * 3 * (d / 2); ++i) {
                        const int64_t t = i / (3 * (d / 2));
                        const int64_t h = i / (d / 2) % 3;
                        const int64_t p = i % (d / 2);
                        const double angle = double(positions[size_t(t)]) * get(inv_freq, p);
                        const double a = get3(in, t, h, p);
                        const double b = get3(in, t, h, p + d / 2);
                        const double tolerance = 2e-7 + unit_of(out_dtype);
                        check_close("rope", get3(out, t, h, p),
                                    a * std::cos(angle) - b * std::sin(angle), tolerance);
                        check_close("rope", get3(out, t, h, p + d / 2),
                                    b * std::cos(angle) + a * std::sin(angle), tolerance);
                    }
                    if (in_dtype == out_dtype) {
                        ops::rope(one_thread(), in, in, i64_tensor(positions), inv_freq);
                        CHECK(same_bits(in, out));
                    }
                }
            }
        }
    });
    const Stream &s = one_thread();
    const Tensor x = random_tensor({2, 1, 4}, kF32);
    const Tensor odd = random_tensor({2, 1, 3}, kF32);
    const Tensor freq = Tensor::create({2}, kF32);
    CHECK_THROWS(ops::rope(s, x, x, i64_tensor({1}), freq), "rope", "positions", "[1]", "[2]");
    CHECK_THROWS(ops::rope(s, odd, odd, i64_tensor({1, 2}), freq), "rope", "in", "even");
    CHECK_THROWS(ops::rope(s, x, x, i64_tensor({1, 2}), Tensor::create({3}, kF32)), "rope",
                 "inv_freq");
}

TEST(kv_store_writes_slots_and_nothing_else) {
    for_each_isa([] {
        for (DType cache_dtype : kReal) {
            for (DType value_dtype : kReal) {
                const Tensor cache = random_tensor({13, 2, 33}, cache_dtype);
                const Tensor before = Tensor::create({13, 2, 33}, cache_dtype);
                std::memcpy(before.data(), cache.data(), size_t(cache.bytes()));
                const Tensor values = random_strided({3, 2, 33}, value_dtype);
                const std::vector<int32_t> slots = {12, 0, 5};
                ops::kv_store(two_threads(), cache, values, i32_tensor(slots));
                for (int64_t slot = 0; slot < 13; ++slot) {
                    const auto found = std::find(slots.begin(), slots.end(), int32_t(slot));
                    const int64_t i = found - slots.begin();
                    for (int64_t x = 0; x < 66; ++x) {
                        if (found == slots.end()) {
                            CHECK_EQ(get(cache, slot * 66 + x), get(before, slot * 66 + x));
                            continue;
                        }
                        const double value = get3(values, i, x / 33, x % 33);
                        check_close("kv_store", get(cache, slot * 66 + x), value,
                                    unit_of(cache_dtype) * std::abs(value) + 1e-7);
                    }
                }
            }
        }
    });
    const Stream &s = one_thread();
    const Tensor cache = Tensor::create({4, 1, 2}, kF32);
    const Tensor values = Tensor::create({1, 1, 2}, kF32);
    CHECK_THROWS(ops::kv_store(s, cache, values, i32_tensor({4})), "kv_store", "slots", "4");
    CHECK_THROWS(ops::kv_store(s, cache, values, i32_tensor({-1})), "kv_store", "slots", "-1");
    CHECK_THROWS(ops::kv_store(s, cache, Tensor::create({1, 2, 2}, kF32), i32_tensor({0})),
                 "kv_store", "values", "[1, 2, 2]", "[1, 1, 2]");
}

TEST(rearrange_copies_any_layout) {
    for (DType dtype : {kF32, kBf16, kI64, LLAISYS_DTYPE_U8}) {
        const Tensor in = Tensor::create({3, 5, 7}, dtype);
        for (int64_t i = 0; i < in.bytes(); ++i) {
            in.data()[i] = std::byte(i % 251);
        }
        const int order[] = {2, 0, 1};
        const Tensor out = Tensor::create({7, 3, 5}, dtype);
        ops::rearrange(two_threads(), out, in.permute(order));
        CHECK(same_bits(out, in.permute(order)));
    }
    const Tensor a = Tensor::create({2}, kF32);
    CHECK_THROWS(ops::rearrange(one_thread(), a, Tensor::create({3}, kF32)), "rearrange", "out");
    CHECK_THROWS(ops::rearrange(one_thread(), a, Tensor::create({2}, kF16)), "rearrange", "out");
}

TEST(swiglu_matches_twin) {
    for_each_isa([] {
        for (DType gate_dtype : kReal) {
            for (DType up_dtype : kReal) {
                for (DType out_dtype : kReal) {
                    for (int64_t d : {1, 7, 577, 1031}) {
                        const Tensor gate = random_strided({5, d}, gate_dtype, 100.0f);
                        const Tensor up = random_strided({5, d}, up_dtype);
                        const Tensor out = random_strided({5, d}, out_dtype);
                        ops::swiglu(two_threads(), out, gate, up);
                        for (int64_t i = 0; i < 5 * d; ++i) {
                            const double g = get2(gate, i / d, i % d);
                            const double y = get2(up, i / d, i % d) * g / (1 + std::exp(-g));
                            check_close("swiglu", get2(out, i / d, i % d), y,
                                        unit_of(out_dtype) * std::abs(y) + 1e-7);
                        }
                    }
                }
            }
        }
    });
    const Tensor x = Tensor::create({2, 4}, kF32);
    CHECK_THROWS(ops::swiglu(one_thread(), x, x, Tensor::create({2, 3}, kF32)), "swiglu", "up",
                 "[2, 3]", "[2, 4]");
}

TEST(softmax_matches_twin) {
    for_each_isa([] {
        for (DType dtype : kReal) {
            for (int64_t n : {1, 3, 31, 33, 577, 5001}) {
                const Tensor in = random_tensor({4, n}, dtype, 30.0f);
                set(in, n / 2, -kInf);
                for (int64_t j = 0; j < n; ++j) {
                    set(in, 2 * n + j, -kInf);
                }
                const Tensor out = Tensor::create({4, n}, kF32);
                ops::softmax(two_threads(), out, in);
                for (int64_t r = 0; r < 4; ++r) {
                    double max = -kInf;
                    double sum = 0;
                    for (int64_t j = 0; j < n; ++j) {
                        max = std::max(max, get(in, r * n + j));
                    }
                    for (int64_t j = 0; j < n && max > -kInf; ++j) {
                        sum += std::exp(get(in, r * n + j) - max);
                    }
                    for (int64_t j = 0; j < n; ++j) {
                        const double y = sum > 0 ? std::exp(get(in, r * n + j) - max) / sum : 0;
                        check_close("softmax", get(out, r * n + j), y, 3e-6 * y + 1e-30);
                    }
                }
                if (dtype == kF32) {
                    ops::softmax(one_thread(), in, in);
                    CHECK(same_bits(in, out));
                }
            }
        }
    });
    const Tensor x = Tensor::create({2, 4}, kF16);
    CHECK_THROWS(ops::softmax(one_thread(), x, x), "softmax", "out", "f16", "f32");
}

TEST(topk_is_sorted_and_takes_the_first_on_a_tie) {
    for_each_isa([] {
        for (int64_t n : {1, 3, 31, 577, 5000}) {
            for (int64_t k : {int64_t(1), int64_t(3), n / 2, n}) {
                if (k < 1 || k > n) {
                    continue;
                }
                const Tensor values = random_tensor({3, n}, kF32);
                for (int64_t j = 0; j < n; ++j) {
                    set(values, n + j, float(random_int(0, 5)));
                    set(values, 2 * n + j, j % 3 == 0 ? kNan : j % 3 == 1 ? -kInf : float(j % 7));
                }
                const Tensor index = Tensor::create({3, k}, kI32);
                const Tensor value = Tensor::create({3, k}, kF32);
                ops::topk(two_threads(), index, value, values);
                for (int64_t r = 0; r < 3; ++r) {
                    std::vector<std::pair<double, int64_t>> all;
                    for (int64_t j = 0; j < n; ++j) {
                        const double x = get(values, r * n + j);
                        all.push_back({std::isnan(x) ? kInf : -x, j});
                    }
                    std::sort(all.begin(), all.end());
                    for (int64_t i = 0; i < k; ++i) {
                        CHECK_EQ(index.as<int32_t>()[r * k + i], all[size_t(i)].second);
                        CHECK_EQ(get(value, r * k + i), -all[size_t(i)].first);
                    }
                }
            }
        }
    });
    const Stream &s = one_thread();
    const Tensor values = Tensor::create({1, 3}, kF32);
    CHECK_THROWS(ops::topk(s, Tensor::create({1, 4}, kI32), Tensor::create({1, 4}, kF32), values),
                 "topk", "4", "3");
    CHECK_THROWS(ops::topk(s, Tensor::create({1, 2}, kI64), Tensor::create({1, 2}, kF32), values),
                 "topk", "index", "i64", "i32");
}

TEST(conversions_match_the_scalar_ones_bit_for_bit) {
    for_each_isa([] {
        const ops::cpu::Kernels &kernels = ops::cpu::kernels();
        std::vector<f16_t> half(65536);
        std::vector<bf16_t> brain(65536);
        std::vector<float> wide(65536);
        for (uint32_t i = 0; i < 65536; ++i) {
            half[i].bits = uint16_t(i);
            brain[i].bits = uint16_t(i);
        }
        const auto same = [](float a, float b) {
            return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b));
        };
        kernels.widen_f16(wide.data(), half.data(), 65536);
        for (uint32_t i = 0; i < 65536; ++i) {
            CHECK(same(wide[i], to_f32(half[i])));
        }
        kernels.widen_bf16(wide.data(), brain.data(), 65536);
        for (uint32_t i = 0; i < 65536; ++i) {
            CHECK(same(wide[i], to_f32(brain[i])));
        }
        for (uint32_t i = 0; i < 65536; ++i) {
            wide[i] = float_of(uint32_t(random_int(0, 0xffffffffll)));
        }
        kernels.narrow_f16(half.data(), wide.data(), 65536);
        kernels.narrow_bf16(brain.data(), wide.data(), 65536);
        for (uint32_t i = 0; i < 65536; ++i) {
            CHECK(same(to_f32(half[i]), to_f32(from_f32<f16_t>(wide[i]))));
            CHECK(same(to_f32(brain[i]), to_f32(from_f32<bf16_t>(wide[i]))));
        }
    });
}
