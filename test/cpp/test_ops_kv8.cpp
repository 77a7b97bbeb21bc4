// Keys and values in eight bits: what is stored byte for byte against a naive reference, attention against
// the reference in double over the values that were stored, on every instruction set of this machine.
#include "attention_cases.hpp"

#include "ops/cpu/prepared_attention.hpp"
#include "ops/kv_store/op.hpp"
#include "runtime/kv_cache/kv_storage.hpp"

using namespace ops_test;

namespace {

constexpr DType kI8 = LLAISYS_DTYPE_I8;

Tensor empty_cache(int64_t n_slots, int64_t heads, int64_t d) {
    return Tensor::create({n_slots, heads, ops::head_stride(kI8, d)}, kI8);
}

Tensor all_slots(int64_t n) {
    std::vector<int32_t> slots(static_cast<size_t>(n));
    for (size_t i = 0; i < slots.size(); ++i) {
        slots[i] = int32_t(i);
    }
    return i32_tensor(slots);
}

// The rule of ops/kv_layer.hpp on one head's row, straight from its text.
void naive_row(const std::vector<float> &values, int8_t *out) {
    float largest = 0.0f;
    bool is_finite = true;
    for (float value : values) {
        is_finite = is_finite && std::isfinite(value);
        largest = std::max(largest, std::abs(value));
    }
    const bool is_small = largest < 0x1p-100f;
    const float scale = !is_finite ? kNan : is_small ? 0.0f : largest / 127.0f;
    for (size_t i = 0; i < values.size(); ++i) {
        const bool is_zero = !is_finite || is_small;
        out[i] = is_zero ? int8_t(0) : int8_t(std::nearbyint(values[i] * (127.0f / largest)));
    }
    std::memcpy(out + values.size(), &scale, sizeof scale);
}

// The whole of `real` [n, heads, d] in eight bits.
Tensor naive_cache(const Tensor &real) {
    const int64_t d = real.size(2);
    const Tensor cache = empty_cache(real.size(0), real.size(1), d);
    int8_t *row = cache.as<int8_t>();
    for (int64_t i = 0; i < real.size(0); ++i) {
        for (int64_t h = 0; h < real.size(1); ++h, row += ops::head_stride(kI8, d)) {
            std::vector<float> values;
            for (int64_t x = 0; x < d; ++x) {
                values.push_back(float(get3(real, i, h, x)));
            }
            naive_row(values, row);
        }
    }
    return cache;
}

// What a cache in eight bits holds, in f32.
Tensor widened(const Tensor &cache) {
    const ops::KvLayer kv = ops::slot_major(cache, cache);
    const Tensor wide = Tensor::create({kv.n_slots, kv.n_heads, kv.head_dim}, kF32);
    ops::kv_load(one_thread(), wide, nullptr, kv, all_slots(kv.n_slots));
    return wide;
}

// The case with its caches in eight bits; `reference`: with what these hold, in f32.
AttentionCase in_eight_bits(const AttentionCase &c, AttentionCase *reference = nullptr) {
    AttentionCase packed = c;
    packed.k = naive_cache(c.k);
    packed.v = naive_cache(c.v);
    if (reference != nullptr) {
        *reference = c;
        reference->k = widened(packed.k);
        reference->v = widened(packed.v);
        reference->is_widened = true;
    }
    return packed;
}

// Every instruction set, and where keys meet queries as bytes also without that.
template <typename Body> void for_each_way(const Body &body) {
    for_each_isa([&] {
        body();
        if (ops::cpu::prepared_attention(LLAISYS_DTYPE_I8, LLAISYS_DTYPE_I8, 64) != nullptr) {
            ops::cpu::allow_prepared_attention(false);
            body();
            ops::cpu::allow_prepared_attention(true);
        }
    });
}

// Two tokens of one list of two entries: one KV head, one query head, f32.
AttentionCase two_by_two(int64_t d) {
    AttentionCase c = attention_case(1, 2, 2, 1, 1, d, 1, kF32, kF32);
    c.q = Tensor::create({2, 1, d}, kF32);
    return c;
}

} // namespace

TEST(kv_store_quantises_each_head_of_a_token) {
    for_each_isa([] {
        for (DType dtype : kReal) {
            for (int64_t d : {1, 2, 7, 16, 33, 64, 80, 128, 1024}) {
                const Tensor values = random_strided({5, 3, d}, dtype, 3.0f);
                if (d > 2) {
                    set(values, values.stride(0), kNan);                         // token 1, head 0
                    set(values, values.stride(0) + values.stride(1) + 1, -kInf); // token 1, head 1
                    for (int64_t x = 0; x < d; ++x) {                            // token 2, head 0
                        set(values, 2 * values.stride(0) + x, x == 1 ? 1e-37f : 0.0f);
                    }
                }
                const Tensor cache = empty_cache(5, 3, d);
                const ops::KvLayer kv = ops::slot_major(cache, cache);
                ops::kv_store(two_threads(), kv, values, nullptr, all_slots(5));
                CHECK(same_bits(cache, naive_cache(values)));
            }
        }
    });
}

TEST(kv_store_leaves_other_slots_and_kv_load_reads_them_back) {
    for_each_isa([] {
        const Tensor k = random_tensor({4, 2, 20}, kF32);
        const Tensor v = random_tensor({4, 2, 20}, kF32);
        const ops::KvLayer kv = ops::slot_major(empty_cache(9, 2, 20), empty_cache(9, 2, 20));
        const Tensor slots = i32_tensor({7, 0, 3, 8});
        ops::kv_store(one_thread(), kv, k, &v, slots);
        for (int64_t slot : {1, 2, 4, 5, 6}) {
            CHECK(same_bits(kv.k.slice(0, slot, slot + 1), empty_cache(1, 2, 20)));
        }
        for (DType dtype : kReal) { // within half a step of what was stored
            const Tensor back = Tensor::create(k.shape(), dtype);
            const Tensor v_back = Tensor::create(v.shape(), dtype);
            ops::kv_load(two_threads(), back, &v_back, kv, slots);
            for (int64_t i = 0; i < k.elements(); ++i) {
                check_close("k", get(back, i), get(k, i), 0.5 / 127 + unit_of(dtype));
                check_close("v", get(v_back, i), get(v, i), 0.5 / 127 + unit_of(dtype));
            }
        }
        // As they lie: no bit changes on the way to other slots.
        const Tensor rows = empty_cache(4, 2, 20);
        const Tensor v_rows = empty_cache(4, 2, 20);
        ops::kv_load(one_thread(), rows, &v_rows, kv, slots);
        ops::kv_store(one_thread(), kv, rows, &v_rows, i32_tensor({1, 2, 4, 5}));
        CHECK(same_bits(kv.k.slice(0, 1, 2), kv.k.slice(0, 7, 8)));
        CHECK(same_bits(kv.v.slice(0, 5, 6), kv.v.slice(0, 8, 9)));
    });
}

TEST(attention_over_eight_bits_matches_reference) {
    for_each_way([] {
        for (const AttentionSizes &sizes : kAttentionSizes) {
            AttentionCase reference;
            const AttentionCase c = in_eight_bits(attention_case(sizes, kF32, kF32), &reference);
            const bool is_rounded =
                ops::cpu::prepared_attention(LLAISYS_DTYPE_I8, LLAISYS_DTYPE_I8, 64) !=
                nullptr; // queries, to 16 bits
            check_attention(reference, run_attention(two_threads(), c), is_rounded ? 1e-4 : 2e-5);
        }
    });
}

TEST(attention_over_eight_bits_gives_a_token_the_same_bits_in_any_batch) {
    for_each_way([] {
        for (int64_t d : {24, 64}) { // in whole panels or not
            check_any_batch(in_eight_bits(attention_case(3, 1100, 37, 6, 2, d, 16, kF32, kF32)));
        }
    });
}

TEST(attention_over_eight_bits_never_reads_what_a_token_does_not_see) {
    for_each_way([] {
        AttentionCase real = attention_case(1, 100, 30, 4, 2, 16, 16, kF32, kF32);
        const Tensor out = run_attention(one_thread(), in_eight_bits(real));
        for (int64_t e = 85; e < 100; ++e) { // entries from 85 on: seen by tokens 15.. only
            for (int64_t x = 0; x < 2 * 16; ++x) {
                set(real.k, slot_of(real.lists, 0, e) * 32 + x, kNan);
                set(real.v, slot_of(real.lists, 0, e) * 32 + x, kInf);
            }
        }
        const Tensor again = run_attention(one_thread(), in_eight_bits(real));
        CHECK(same_bits(out.slice(0, 0, 15), again.slice(0, 0, 15)));
        CHECK(std::isnan(get3(again, 29, 0, 0)));
    });
}

// The largest sums of bytes that there are: all values at their limit, of one sign and of both.
TEST(attention_over_eight_bits_does_not_overflow) {
    for_each_way([] {
        for (int64_t d : {1, 4, 5, 64, 511, 512, 513, 1023, 1024}) {
            for (float sign : {1.0f, -1.0f}) {
                AttentionCase c = two_by_two(d);
                for (int64_t x = 0; x < 2 * d; ++x) { // scores of one sign for entry 1 alone
                    set(c.q, x, sign * 3.0f / float(d));
                }
                for (int64_t x = 0; x < c.k.elements(); ++x) {
                    set(c.k, x, x / d == slot_of(c.lists, 0, 1) ? sign : -sign);
                }
                AttentionCase reference;
                const AttentionCase packed = in_eight_bits(c, &reference);
                check_attention(reference, run_attention(one_thread(), packed));
            }
        }
    });
}

TEST(attention_over_eight_bits_takes_any_query) {
    for_each_way([] {
        AttentionCase c = two_by_two(20);
        for (int64_t x = 0; x < 20; ++x) {
            set(c.q, x, 0.0f); // weighs everything it sees alike
            set(c.q, 20 + x, x == 3 ? kNan : 1.0f);
        }
        AttentionCase reference;
        const AttentionCase packed = in_eight_bits(c, &reference);
        check_attention(tokens_of(reference, 0, 1),
                        run_attention(one_thread(), tokens_of(packed, 0, 1)));
        set(c.q, 7, 1e-37f); // far too small to matter
        check_attention(tokens_of(reference, 0, 1),
                        run_attention(one_thread(), tokens_of(in_eight_bits(c), 0, 1)));
        for (float bad : {kNan, kInf, -kInf}) {
            set(c.q, 20 + 3, bad);
            const Tensor out = run_attention(two_threads(), in_eight_bits(c));
            CHECK(std::isfinite(get3(out, 0, 0, 0)));
            CHECK(std::isnan(get3(out, 1, 0, 0)));
        }
    });
}

TEST(storage_in_eight_bits_copies_bytes_and_quantises_what_it_rotates) {
    const int64_t d = 8;
    const Tensor inv_freq = random_tensor({d / 2}, kF32);
    runtime::KvStorage storage(one_thread(), 2, 6, 3, d, kI8, inv_freq);
    CHECK(storage.bytes() == 2 * 2 * 6 * 3 * (d + 4)); // layers, k and v, slots, heads
    for (const ops::KvLayer &layer : storage.layers()) {
        const Tensor rows = random_tensor({6, 3, d}, kF32);
        ops::kv_store(one_thread(), layer, rows, &rows, all_slots(6));
    }
    const Tensor keys = widened(storage.layers()[1].k);
    const int32_t src[] = {0, 1};
    const int32_t dst[] = {1, 5};
    storage.copy_slots(one_thread(), src, dst, 2);
    const Tensor copied = widened(storage.layers()[1].k);
    CHECK(same_bits(copied.slice(0, 1, 2), keys.slice(0, 0, 1)));
    CHECK(same_bits(copied.slice(0, 5, 6), keys.slice(0, 1, 2)));
    const int32_t slots[] = {2, 4};
    const int64_t delta[] = {3, -5};
    storage.shift_slots(one_thread(), slots, delta, 2);
    const Tensor turned = widened(storage.layers()[1].k);
    CHECK(same_bits(turned.slice(0, 3, 4), copied.slice(0, 3, 4)));
    for (int64_t i = 0; i < 2; ++i) {
        for (int64_t h = 0; h < 3; ++h) {
            for (int64_t x = 0; x < d / 2; ++x) {
                const double angle = double(delta[i]) * get(inv_freq, x);
                const double low = get3(keys, slots[i], h, x);
                const double high = get3(keys, slots[i], h, x + d / 2);
                check_close("shift", get3(turned, slots[i], h, x),
                            low * std::cos(angle) - high * std::sin(angle), 1.5 / 2 / 127);
                check_close("shift", get3(turned, slots[i], h, x + d / 2),
                            high * std::cos(angle) + low * std::sin(angle), 1.5 / 2 / 127);
            }
        }
    }
}

TEST(storage_of_keys_that_contain_the_values) {
    const int64_t d = 20; // 12 values, 8 rotated
    const Tensor inv_freq = random_tensor({4}, kF32);
    runtime::KvStorage storage(one_thread(), 2, 6, 1, d, LLAISYS_DTYPE_BF16, inv_freq, 12);
    CHECK(storage.bytes() == 2 * 6 * d * 2); // layers, slots, values of a key, bytes of each
    const Tensor rows = random_tensor({6, 1, d}, LLAISYS_DTYPE_BF16);
    for (const ops::KvLayer &layer : storage.layers()) {
        ops::kv_store(one_thread(), layer, rows, nullptr, all_slots(6));
    }
    const ops::KvLayer &layer = storage.layers()[1];
    const int32_t src[] = {0};
    const int32_t dst[] = {5};
    storage.copy_slots(one_thread(), src, dst, 1);
    CHECK(same_bits(layer.k.slice(0, 5, 6), rows.slice(0, 0, 1)));
    const int32_t slots[] = {2};
    const int64_t delta[] = {3};
    storage.shift_slots(one_thread(), slots, delta, 1);
    for (int64_t x = 0; x < 12; ++x) { // values are not rotated
        CHECK(get3(layer.k, 2, 0, x) == get3(rows, 2, 0, x));
    }
    for (int64_t x = 0; x < 4; ++x) {
        const double angle = 3 * get(inv_freq, x);
        const double low = get3(rows, 2, 0, 12 + x);
        const double high = get3(rows, 2, 0, 16 + x);
        check_close("shift", get3(layer.k, 2, 0, 12 + x),
                    low * std::cos(angle) - high * std::sin(angle), 1e-2);
    }
    CHECK_THROWS(ops::kv_store(one_thread(), layer, rows, &rows, all_slots(6)), "contain");
    CHECK_THROWS(runtime::KvStorage(one_thread(), 1, 4, 1, d, kI8, inv_freq, 12), "kv_cache_dtype",
                 "i8");
}

TEST(caches_in_eight_bits_are_checked) {
    const Stream &s = one_thread();
    const Tensor values = random_tensor({1, 2, 8}, kF32);
    const Tensor slots = i32_tensor({0});
    const auto store = [&](const Tensor &k, const Tensor &v) {
        ops::kv_store(s, ops::slot_major(k, v), values, &values, slots);
    };
    const Tensor good = empty_cache(3, 2, 8);
    store(good, good);
    CHECK_THROWS(store(good, random_tensor({3, 2, 8}, kF32)), "v_cache", "f32", "i8");
    CHECK_THROWS(store(random_tensor({3, 2, 8}, kF32), good), "v_cache", "i8");
    CHECK_THROWS(store(empty_cache(3, 2, 9), good), "v_cache", "[3, 2, 12]", "[3, 2, 13]");
    const Tensor no_values = Tensor::create({3, 2, 4}, kI8);
    CHECK_THROWS(store(no_values, no_values), "k_cache", "[3, 2, 4]", "1 to 1024");
    const Tensor wide = empty_cache(1, 1, 1025);
    CHECK_THROWS(store(wide, wide), "k_cache", "[1, 1, 1029]", "1024");
    const Tensor bytes = Tensor::create({1, 2, 8}, kI8); // no scales
    CHECK_THROWS(ops::kv_store(s, ops::slot_major(good, good), bytes, nullptr, slots), "values",
                 "[1, 2, 8]", "[1, 2, 12]");
}
