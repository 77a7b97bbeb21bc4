// The lora operator against a naive reference in double, on every device, and the grouping of rows
// into tiles.
#include "ops_devices.hpp"

#include "ops/lora/op.hpp"

#include <set>

using namespace ops_test;

namespace {

struct Adapter { // undefined tensors: none
    Tensor a, b;
    float scale = 0;
};

Adapter random_adapter(int64_t rank, int64_t in, int64_t out, DType dtype, float scale) {
    return {random_strided({rank, in}, dtype), random_strided({out, rank}, dtype), scale};
}

ops::LoraRows group(const Stream &stream, const std::vector<int32_t> &slots,
                    const std::vector<int32_t> &ranks) {
    const auto m = int64_t(slots.size());
    const auto n_slots = int64_t(ranks.size());
    const Tensor rows = Tensor::create({m}, kI32);
    const Tensor tiles = Tensor::create({ops::lora_tiles(m, n_slots), 4}, kI32);
    ops::group_lora_rows(slots.data(), m, ranks.data(), n_slots, rows.as<int32_t>(),
                         tiles.as<int32_t>());
    return {on(stream, rows), on(stream, tiles)};
}

struct Case {
    Tensor in;
    std::vector<int32_t> slots;                 // of the rows
    std::vector<std::vector<Adapter>> adapters; // [part][slot]
    std::vector<Tensor> before;                 // of the parts

    // The outputs, on the host.
    std::vector<Tensor> run(const Stream &stream) const {
        const auto n_slots = int64_t(adapters[0].size());
        std::vector<int32_t> ranks(adapters[0].size());
        DType dtype = in.dtype();
        for (const auto &part : adapters) {
            for (size_t s = 0; s < part.size(); ++s) {
                if (part[s].a.defined()) {
                    ranks[s] = std::max(ranks[s], int32_t(part[s].a.size(0)));
                    dtype = part[s].a.dtype();
                }
            }
        }
        const int64_t max_rank = std::max(1, *std::max_element(ranks.begin(), ranks.end()));
        std::vector<ops::LoraWeight> weights;
        std::vector<Tensor> outs;
        std::vector<ops::LoraPart> parts;
        for (size_t p = 0; p < adapters.size(); ++p) {
            weights.push_back(ops::LoraWeight::create(stream, dtype, n_slots, max_rank,
                                                      before[p].size(1), in.size(1)));
            for (size_t s = 0; s < adapters[p].size(); ++s) {
                const Adapter &adapter = adapters[p][s];
                if (adapter.a.defined()) {
                    weights[p].set(stream, int64_t(s), adapter.a, adapter.b, adapter.scale);
                }
            }
            const Tensor copy = Tensor::create(before[p].shape(), before[p].dtype());
            ops::rearrange(one_thread(), copy, before[p]);
            outs.push_back(on(stream, copy));
        }
        for (size_t p = 0; p < adapters.size(); ++p) {
            parts.push_back({&weights[p], &outs[p]});
        }
        const Tensor scratch = Tensor::create(
            {ops::lora_scratch(in.size(0), int64_t(parts.size()), in.size(1), max_rank)}, kF32,
            stream.type(), stream.device_id());
        const ops::LoraRows grouped = group(stream, slots, ranks);
        ops::lora(stream, on(stream, in), parts.data(), int(parts.size()), grouped, scratch);
        for (Tensor &out : outs) {
            out = to_host(stream, out);
        }
        return outs;
    }

    void check(const Stream &stream) const {
        const std::vector<Tensor> outs = run(stream);
        const auto k = size_t(in.size(1));
        for (size_t p = 0; p < outs.size(); ++p) {
            std::vector<double> expected = values_of(before[p]);
            const size_t n = expected.size() / slots.size();
            const std::vector<double> x = values_of(in);
            std::vector<double> size = expected; // sum of the magnitudes of the terms
            for (double &value : size) {
                value = std::abs(value);
            }
            for (size_t i = 0; i < slots.size(); ++i) {
                if (slots[i] < 0 || !adapters[p][size_t(slots[i])].a.defined()) {
                    continue;
                }
                const Adapter &adapter = adapters[p][size_t(slots[i])];
                const std::vector<double> a = values_of(adapter.a), b = values_of(adapter.b);
                const size_t ranks = a.size() / k;
                for (size_t r = 0; r < ranks; ++r) {
                    double t = 0, t_size = 0;
                    for (size_t c = 0; c < k; ++c) {
                        t += a[r * k + c] * x[i * k + c];
                        t_size += std::abs(a[r * k + c] * x[i * k + c]);
                    }
                    for (size_t j = 0; j < n; ++j) {
                        expected[i * n + j] += double(adapter.scale) * t * b[j * ranks + r];
                        size[i * n + j] += std::abs(adapter.scale * t_size * b[j * ranks + r]);
                    }
                }
            }
            check_part(stream, outs[p], expected, size);
        }
    }

    // On a GPU t is rounded to the dtype of the adapters.
    void check_part(const Stream &stream, const Tensor &out, const std::vector<double> &expected,
                    const std::vector<double> &size) const {
        double largest = 1e-3;
        for (const double value : expected) {
            largest = std::max(largest, std::abs(value));
        }
        const double rounding = std::max(unit_of(in.dtype()), unit_of(out.dtype())) * 2 * largest;
        for (int64_t i = 0; i < out.elements(); ++i) {
            const double y = expected[size_t(i)];
            const double tolerance =
                is_cpu(stream)
                    ? 2e-6 * size[size_t(i)] + unit_of(out.dtype()) * (std::abs(y) + 1e-3)
                    : rounding;
            check_close("lora", get(out, i), y, tolerance);
        }
    }

    static std::vector<double> values_of(const Tensor &tensor) {
        std::vector<double> values;
        for (int64_t i = 0; i < tensor.elements(); ++i) {
            values.push_back(get2(tensor, i / tensor.size(1), i % tensor.size(1)));
        }
        return values;
    }
};

// ranks: of the slots; 0: no adapter.
Case make_case(int64_t m, int64_t k, const std::vector<int64_t> &outs,
               const std::vector<int64_t> &ranks, DType in_dtype, DType dtype, DType out_dtype) {
    Case made;
    made.in = random_strided({m, k}, in_dtype);
    for (int64_t i = 0; i < m; ++i) {
        made.slots.push_back(int32_t(random_int(-1, int64_t(ranks.size()) - 1)));
    }
    for (const int64_t n : outs) {
        std::vector<Adapter> part;
        for (size_t s = 0; s < ranks.size(); ++s) {
            part.push_back(ranks[s] == 0 ? Adapter{}
                                         : random_adapter(ranks[s], k, n, dtype, 0.5f + float(s)));
        }
        made.adapters.push_back(part);
        made.before.push_back(random_tensor({m, n}, out_dtype));
    }
    return made;
}

} // namespace

TEST(lora_matches_reference_in_every_dtype) {
    for_each_device([](const Stream &stream) {
        for (DType in_dtype : kReal) {
            for (DType dtype : kReal) {
                for (DType out_dtype : kReal) {
                    if (!is_cpu(stream) && in_dtype != dtype) {
                        continue; // the adapters of a model have its dtype
                    }
                    make_case(9, 45, {37, 60}, {8, 3}, in_dtype, dtype, out_dtype).check(stream);
                }
            }
        }
    });
}

TEST(lora_matches_reference_at_odd_sizes_and_ranks) {
    for_each_device([](const Stream &stream) {
        for (int64_t rank : {1, 3, 8, 16, 17, 64, 256}) {
            for (int64_t m : {1, 3, 5, 17, 70}) {
                make_case(m, 2 * m - 1, {m, 7}, {rank, 0, 33}, kF32, kF32, kF32).check(stream);
            }
        }
        make_case(600, 67, {40, 9, 13}, {5, 0, 64, 1}, kF32, kF32, kF32).check(stream);
    });
}

TEST(lora_matches_reference_at_the_sizes_of_tensor_core_kernels) {
    const auto check = [](const Stream &stream) {
        for (DType dtype : {kBf16, kF16}) {
            for (DType out_dtype : {dtype, kF32}) {
                const auto test = [&](int64_t m, int64_t k, const std::vector<int64_t> &outs,
                                      const std::vector<int64_t> &ranks) {
                    Case made = make_case(m, k, outs, ranks, dtype, dtype, out_dtype);
                    made.in = ops::contiguous(one_thread(), made.in);
                    made.check(stream);
                };
                test(1, 64, {72}, {16});
                test(3, 40, {24, 8, 8}, {1, 8});
                test(17, 1032, {520}, {64, 0, 3});
                test(33, 2088, {264, 128, 128}, {16, 5, 17, 40});
                test(256, 512, {256}, std::vector<int64_t>(9, 16));
                test(513, 200, {104, 104}, {256, 64});
                test(700, 96, {104}, {16, 8});
            }
        }
    };
    for_each_device([&](const Stream &stream) {
        if (!is_cpu(stream)) {
            check(stream);
        }
    });
    check(two_threads());
}

TEST(lora_rows_do_not_depend_on_other_rows_or_threads) {
    for (DType dtype : kReal) {
        const Case together = make_case(37, 131, {523}, {3, 16, 33}, dtype, dtype, dtype);
        const Tensor out = together.run(three_threads())[0];
        CHECK(same_bits(together.run(one_thread())[0], out));
        for (int64_t i = 0; i < 37; ++i) {
            Case alone = together;
            alone.in = together.in.slice(0, i, i + 1);
            alone.slots = {together.slots[size_t(i)]};
            alone.before = {together.before[0].slice(0, i, i + 1)};
            CHECK(same_bits(alone.run(one_thread())[0], out.slice(0, i, i + 1)));
        }
    }
}

TEST(lora_checks_its_arguments) {
    Case made = make_case(3, 6, {5}, {4}, kF32, kF32, kF32);
    made.slots = {0, 1, 0};
    CHECK_THROWS(made.run(one_thread()), "slots[1] must be in [-1, 1), got 1");
    made.slots = {0, 0, 0};
    made.adapters[0][0].b = random_tensor({6, 4}, kF32);
    CHECK_THROWS(made.run(one_thread()), "b: got [6, 4], expected [5, 4]");
    made.adapters[0][0] = random_adapter(257, 6, 5, kF32, 1.0f);
    CHECK_THROWS(made.run(one_thread()), "256", "257");
}

TEST(tiles_cover_every_row_once) {
    for (int64_t m : {1, 15, 16, 17, 200, 512, 513, 2000}) {
        for (int64_t n_slots : {1, 3, 40}) {
            std::vector<int32_t> slots;
            for (int64_t i = 0; i < m; ++i) {
                slots.push_back(int32_t(random_int(-1, n_slots - 1)));
            }
            const ops::LoraRows grouped =
                group(one_thread(), slots, std::vector<int32_t>(size_t(n_slots), 33));
            const int32_t *header = grouped.tiles.as<int32_t>();
            CHECK(header[0] <= header[1]);
            CHECK(header[1] < grouped.tiles.size(0));
            const auto *tiles = reinterpret_cast<const ops::LoraTile *>(header) + 1;
            std::set<int32_t> seen;
            for (int32_t t = 0; t < header[1]; ++t) {
                CHECK(tiles[t].count >= 1 && tiles[t].count <= (m <= 512 ? 16 : 64));
                CHECK_EQ(tiles[t].slot >= 0, t < header[0]);
                CHECK_EQ(tiles[t].rank, t < header[0] ? 48 : 0);
                for (int32_t i = 0; i < tiles[t].count; ++i) {
                    const int32_t row = grouped.rows.as<int32_t>()[tiles[t].first + i];
                    CHECK_EQ(slots[size_t(row)], tiles[t].slot);
                    CHECK(seen.insert(row).second);
                }
            }
            CHECK_EQ(int64_t(seen.size()), m);
        }
    }
}
