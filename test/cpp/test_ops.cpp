// The small operators and the dtype conversions against naive references in double, on every instruction
// set of this machine: odd sizes, strided views, mixed dtypes, in place. The larger operators have
// files of their own: test_ops_linear.cpp, test_ops_attention.cpp, test_ops_logits.cpp.
#include "ops_reference.hpp"

#include "ops/elementwise/op.hpp"
#include "ops/embedding/op.hpp"
#include "ops/glu/op.hpp"
#include "ops/kv_store/op.hpp"
#include "ops/norm/op.hpp"
#include "ops/rearrange/op.hpp"
#include "ops/rope/op.hpp"

using namespace ops_test;

TEST(add_matches_reference) {
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
    CHECK_THROWS(ops::add(s, a, Tensor::create({4}, LLAISYS_DTYPE_I32), a), "add", "a", "i32",
                 "f32");
    CHECK_THROWS(ops::add(s, a, Tensor(), a), "add", "a");
    const Tensor wide = Tensor::create({4, 4}, kF32);
    CHECK_THROWS(ops::add(s, wide.slice(1, 0, 2), wide, wide), "add", "out", "contiguous");
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

TEST(rms_norm_matches_reference) {
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
            // The fused one, into its own input, has the bits of the two passes.
            const Tensor sum = random_tensor({3, 577}, dtype);
            const Tensor residual = Tensor::create({3, 577}, dtype);
            ops::add(one_thread(), residual, sum, x);
            ops::rms_norm(one_thread(), out, residual, weight, 1e-6f);
            ops::add_rms_norm(one_thread(), x, sum, x, weight, 1e-6f);
            CHECK(same_bits(residual, sum));
            CHECK(same_bits(out, x));
        }
    });
}

TEST(rope_matches_reference_at_small_and_large_positions) {
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
                        const Tensor keys = random_strided({n, 2, d}, in_dtype);
                        const Tensor turned = random_strided({n, 2, d}, in_dtype);
                        ops::rope(one_thread(), turned, keys, i64_tensor(positions), inv_freq);
                        ops::rope_both(one_thread(), in, keys, i64_tensor(positions), inv_freq);
                        CHECK(same_bits(in, out));
                        CHECK(same_bits(keys, turned));
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
                const Tensor other = random_tensor({13, 2, 33}, cache_dtype);
                ops::kv_store(two_threads(), ops::slot_major(other, cache), values, &values,
                              i32_tensor(slots));
                CHECK(same_bits(other.slice(0, 5, 6), cache.slice(0, 5, 6)));
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
    const ops::KvLayer kv = ops::slot_major(cache, cache);
    const Tensor values = Tensor::create({1, 1, 2}, kF32);
    CHECK_THROWS(ops::kv_store(s, kv, values, nullptr, i32_tensor({4})), "kv_store", "slots", "4");
    CHECK_THROWS(ops::kv_store(s, kv, values, nullptr, i32_tensor({-1})), "kv_store", "slots",
                 "-1");
    CHECK_THROWS(ops::kv_store(s, kv, Tensor::create({1, 2, 2}, kF32), nullptr, i32_tensor({0})),
                 "kv_store", "values", "[1, 2, 2]", "[1, 1, 2]");
}

TEST(kv_load_reads_what_kv_store_wrote) {
    for (DType cache_dtype : kReal) {
        const Tensor slots = i32_tensor({7, 0, 12, 3, 4});
        const ops::KvLayer kv = ops::slot_major(Tensor::create({13, 3, 31}, cache_dtype),
                                                Tensor::create({13, 3, 31}, cache_dtype));
        const Tensor k = random_tensor({5, 3, 31}, cache_dtype);
        const Tensor v = random_tensor({5, 3, 31}, cache_dtype);
        ops::kv_store(two_threads(), kv, k, &v, slots);
        const Tensor k_back = Tensor::create(k.shape(), cache_dtype);
        const Tensor v_back = Tensor::create(v.shape(), cache_dtype);
        ops::kv_load(two_threads(), k_back, &v_back, kv, slots);
        CHECK(same_bits(k, k_back) && same_bits(v, v_back));
        const Tensor wide = Tensor::create(k.shape(), kF32);
        ops::kv_load(one_thread(), wide, nullptr, kv, slots); // keys alone, any real dtype
        for (int64_t i = 0; i < wide.elements(); ++i) {
            CHECK_EQ(get(wide, i), get(k, i));
        }
        CHECK_THROWS(ops::kv_load(one_thread(), k_back, nullptr, kv, i32_tensor({0, 1, 2, 3, 13})),
                     "kv_load", "slots", "13");
        CHECK_THROWS(ops::kv_load(one_thread(), k_back, &wide, ops::slot_major(kv.k, k), slots),
                     "kv_load", "v_cache", "[5, 3, 31]", "[13, 3, 31]");
    }
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

TEST(swiglu_matches_reference) {
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
