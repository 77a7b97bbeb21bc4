// The linear operator against a naive reference in double, on every instruction set of this machine: odd
// sizes, strided views, mixed dtypes, bit equality across row counts, batches and threads.
#include "ops_reference.hpp"

#include "ops/cpu/strip_kernels.hpp"
#include "ops/head_linear/op.hpp"
#include "ops/linear/op.hpp"

using namespace ops_test;

namespace {

struct LinearCase {
    Tensor in;
    Tensor weight;
    Tensor bias; // may be undefined
};

// Activations are rounded to bf16 there, and denormal numbers are taken for zero.
bool uses_tiles(const Tensor &weight) {
    return weight.dtype() == kBf16 && ops::cpu::strip_kernels(kBf16) != nullptr;
}

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
    const bool rounds = uses_tiles(c.weight);
    for (int64_t i = 0; i < out.size(0); ++i) {
        const int64_t row = rows != nullptr ? rows[i] : i;
        for (int64_t j = 0; j < out.size(1); ++j) {
            double sum = 0;
            double size = 0;
            for (int64_t k = 0; k < c.in.size(1); ++k) {
                const double x = get2(c.in, row, k);
                const double product =
                    (rounds ? to_f32(from_f32<bf16_t>(float(x))) : x) * get2(c.weight, j, k);
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

TEST(head_linear_matches_reference) {
    for (const DType dtype : {kF32, LLAISYS_DTYPE_BF16, LLAISYS_DTYPE_F16}) {
        for (const int64_t n : {1, 5, 40}) {
            const int64_t heads = 3, n_out = 37, k = 20;
            const Tensor weight = random_tensor({heads * n_out, k}, dtype);
            const bool rounds = uses_tiles(weight);
            const ops::ExpertWeights packed =
                ops::ExpertWeights::pack(two_threads(), weight, heads);
            // Parts of wider rows, as queries and results of latent attention are.
            const Tensor in = random_tensor({n, heads, k + 4}, kF32).slice(2, 4, k + 4);
            const Tensor out = random_tensor({n, heads, n_out + 3}, kF32).slice(2, 0, n_out);
            ops::head_linear(two_threads(), out, in, packed);
            for (int64_t t = 0; t < n; ++t) {
                for (int64_t h = 0; h < heads; ++h) {
                    for (int64_t o = 0; o < n_out; ++o) {
                        double sum = 0;
                        for (int64_t i = 0; i < k; ++i) {
                            const double x = get3(in, t, h, i);
                            sum += (rounds ? to_f32(from_f32<bf16_t>(float(x))) : x) *
                                   get3(weight.view({heads, n_out, k}), h, o, i);
                        }
                        check_close("head_linear", get3(out, t, h, o), sum, 1e-4);
                    }
                }
            }
            const Tensor one = Tensor::create({1, heads, n_out}, kF32); // the same bits alone
            ops::head_linear(one_thread(), one, in.slice(0, n - 1, n), packed);
            for (int64_t h = 0; h < heads; ++h) {
                CHECK(get3(one, 0, h, 5) == get3(out, n - 1, h, 5));
            }
        }
    }
    const ops::ExpertWeights packed =
        ops::ExpertWeights::pack(one_thread(), random_tensor({6, 4}, kF32), 2);
    CHECK_THROWS(ops::head_linear(one_thread(), Tensor::create({1, 2, 3}, kF32),
                                  random_tensor({1, 3, 4}, kF32), packed),
                 "head_linear", "in", "[1, 3, 4]", "[1, 2, 4]");
}

TEST(linear_matches_reference_over_odd_sizes) {
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

TEST(linear_knows_every_16_bit_weight) {
    for_each_isa([] {
        for (DType dtype : {kF16, kBf16}) {
            const int64_t k = 4; // what a tile takes in one step: each of them has its turn
            const Tensor weight = Tensor::create({65536, k}, dtype);
            std::fill_n(weight.as<uint16_t>(), 65536 * k, uint16_t(0));
            for (int64_t j = 0; j < 65536; ++j) {
                weight.as<uint16_t>()[j * k + j / 32 % k] = uint16_t(j);
            }
            for (int64_t m : {1, 2, 9, 30}) {
                const Tensor in = Tensor::create({m, k}, kF32);
                std::fill_n(in.as<float>(), m * k, 1.0f);
                const Tensor out = run_linear(two_threads(), {in, weight, {}}, kF32);
                for (int64_t i = 0; i < m * 65536; ++i) {
                    const double got = get2(out, i / 65536, i % 65536);
                    const int64_t j = i % 65536;
                    const double wanted = get2(weight, j, j / 32 % k);
                    const bool is_lost = uses_tiles(weight) && std::abs(wanted) < 0x1p-126;
                    CHECK(std::isnan(wanted) ? std::isnan(got) : got == (is_lost ? 0.0 : wanted));
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

TEST(linear_gives_a_row_the_same_bits_in_any_batch) {
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
