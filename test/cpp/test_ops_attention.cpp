// Both attention operators against a naive reference in double, on every instruction set of this
// machine: odd sizes, blocks and cells, windows, mixed dtypes, bit equality in any batch.
#include "attention_cases.hpp"

#include "ops/self_attention_masked/op.hpp"

using namespace ops_test;

TEST(attention_matches_reference_over_odd_sizes) {
    for_each_isa([] {
        for (const AttentionSizes &sizes : kAttentionSizes) {
            const AttentionCase c = attention_case(sizes, kF32, kBf16);
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
        for (DType kv : {kF32, kBf16}) {
            AttentionCase c = attention_case(1, 700, 40, 4, 2, 32, 16, kF32, kv);
            for (int64_t i = 0; i < 40; ++i) {
                int32_t *end = c.lists.end.as<int32_t>();
                c.lists.begin.as<int32_t>()[i] =
                    i % 7 == 3 ? end[i] : int32_t(random_int(0, end[i]));
            }
            check_attention(c, run_attention(two_threads(), c));
            for (int64_t i = 0; i < 40; ++i) {
                c.lists.end.as<int32_t>()[i] = 0;
            }
            const Tensor nothing = run_attention(two_threads(), c);
            CHECK(same_bits(nothing, Tensor::create(nothing.shape(), kF32)));
        }
    });
}

TEST(attention_never_reads_what_a_token_does_not_see) {
    for_each_isa([] {
        for (DType kv : {kF32, kBf16}) {
            AttentionCase c = attention_case(1, 100, 30, 4, 2, 32, 16, kF32, kv);
            const Tensor out = run_attention(one_thread(), c);
            for (int64_t e = 85; e < 100; ++e) { // entries from 85 on: seen by tokens 15.. only
                for (int64_t x = 0; x < 2 * 32; ++x) {
                    set(c.k, slot_of(c.lists, 0, e) * 64 + x, kNan);
                    set(c.v, slot_of(c.lists, 0, e) * 64 + x, kInf);
                }
            }
            const Tensor again = run_attention(one_thread(), c);
            CHECK(same_bits(out.slice(0, 0, 15), again.slice(0, 0, 15)));
        }
    });
}

TEST(attention_of_a_query_that_is_not_finite_is_nan) {
    for_each_isa([] {
        for (DType kv : {kF32, kBf16}) {
            const AttentionCase c = attention_case(1, 100, 30, 4, 2, 32, 16, kF32, kv);
            const Tensor out = run_attention(one_thread(), c);
            const int64_t at = 7 * c.q.stride(0) + 2 * c.q.stride(1) + 5;
            for (float value : {kNan, kInf, -kInf}) {
                const float before = get3(c.q, 7, 2, 5);
                set(c.q, at, value);
                const Tensor again = run_attention(one_thread(), c);
                set(c.q, at, before);
                for (int64_t x = 0; x < 32; ++x) {
                    CHECK(std::isnan(get3(again, 7, 2, x)));
                    set(again, 7 * again.stride(0) + 2 * again.stride(1) + x, get3(out, 7, 2, x));
                }
                CHECK(same_bits(out, again)); // other rows are unchanged
            }
        }
    });
}

TEST(attention_gives_a_token_the_same_bits_in_any_batch) {
    for_each_isa([] {
        for (DType kv : kReal) {
            const int64_t d = kv == kF16 ? 24 : 64; // in whole panels or not
            check_any_batch(attention_case(3, 1100, 37, 6, 2, d, 16, kF32, kv));
        }
    });
}

TEST(attention_reads_values_from_the_keys) {
    const auto latent = [](AttentionCase c, int64_t value_dim) {
        c.v = c.k;
        c.value_dim = value_dim;
        return c;
    };
    for_each_isa([&] {
        for (DType kv : kReal) {
            for (const Stream *stream : {&one_thread(), &two_threads()}) {
                for (const AttentionCase &c :
                     {latent(attention_case(1, 65, 1, 16, 1, 40, 16, kF32, kv), 32),
                      latent(attention_case(2, 70, 9, 3, 1, 576, 16, kF32, kv), 512),
                      latent(attention_case(1, 1100, 2, 4, 2, 35, 7, kF32, kv), 24)}) {
                    check_attention(c, run_attention(*stream, c));
                }
            }
        }
        check_any_batch(latent(attention_case(3, 300, 37, 4, 1, 72, 16, kF32, kF32), 64));
    });
    const AttentionCase c = attention_case(1, 20, 2, 4, 1, 8, 4, kF32, kF32);
    const Tensor out = Tensor::create({2, 4, 9}, kF32);
    CHECK_THROWS(ops::attention(one_thread(), out, c.q, ops::slot_major(c.k, 9), c.lists, 1.0f),
                 "attention", "values of 9", "the 8 of a key");
}

TEST(attention_rejects_bad_arguments) {
    const Stream &s = one_thread();
    const AttentionCase good = attention_case(2, 20, 2, 4, 2, 8, 4, kF32, kF32);
    const Tensor out = Tensor::create({4, 4, 8}, kF32);
    const auto run = [&](const AttentionCase &c) {
        ops::attention(s, out, c.q, ops::slot_major(c.k, c.v), c.lists, c.scale);
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

TEST(masked_attention_matches_reference) {
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
