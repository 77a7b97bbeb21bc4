// The lora operator against a naive reference in double, on every instruction set of this machine,
// and the grouping of rows into tiles.
#include "ops_reference.hpp"

#include "ops/lora/op.hpp"

#include <set>

using namespace ops_test;

namespace {

struct Adapter {
    Tensor a, b;
    float scale;
};

ops::LoraRows group(const std::vector<int32_t> &slots, int64_t n_slots) {
    const auto m = int64_t(slots.size());
    ops::LoraRows rows{Tensor::create({m}, kI32),
                       Tensor::create({ops::lora_tiles(m, n_slots), 4}, kI32)};
    const std::vector<int32_t> ranks(size_t(n_slots), 33);
    ops::group_lora_rows(slots.data(), m, ranks.data(), n_slots, rows.rows.as<int32_t>(),
                         rows.tiles.as<int32_t>());
    return rows;
}

Tensor run(const Stream &stream, const std::vector<Adapter> &adapters, const Tensor &in,
           const Tensor &before, const std::vector<int32_t> &slots) {
    const auto n_slots = int64_t(adapters.size());
    const int64_t max_rank = 40;
    const ops::LoraWeight weight = ops::LoraWeight::create(stream, adapters[0].a.dtype(), n_slots,
                                                           max_rank, before.size(1), in.size(1));
    for (int64_t s = 0; s < n_slots; ++s) {
        weight.set(stream, s, adapters[size_t(s)].a, adapters[size_t(s)].b,
                   adapters[size_t(s)].scale);
    }
    const Tensor out = Tensor::create(before.shape(), before.dtype());
    ops::rearrange(stream, out, before);
    const Tensor scratch =
        Tensor::create({ops::lora_scratch(in.size(0), 1, in.size(1), weight.max_rank())}, kF32);
    const ops::LoraPart part{&weight, &out};
    ops::lora(stream, in, &part, 1, group(slots, n_slots), scratch);
    return out;
}

void check_lora(const std::vector<Adapter> &adapters, const Tensor &in, const Tensor &before,
                const std::vector<int32_t> &slots, const Tensor &out) {
    for (int64_t i = 0; i < in.size(0); ++i) {
        for (int64_t j = 0; j < out.size(1); ++j) {
            double expected = get2(before, i, j);
            double size = std::abs(expected);
            if (slots[size_t(i)] >= 0) {
                const Adapter &adapter = adapters[size_t(slots[size_t(i)])];
                for (int64_t r = 0; r < adapter.a.size(0); ++r) {
                    double t = 0;
                    for (int64_t k = 0; k < in.size(1); ++k) {
                        t += get2(adapter.a, r, k) * get2(in, i, k);
                    }
                    expected += adapter.scale * t * get2(adapter.b, j, r);
                    size += std::abs(adapter.scale * t * get2(adapter.b, j, r)) + 1;
                }
            }
            check_close("lora", get2(out, i, j), expected,
                        1e-5 * size + unit_of(out.dtype()) * (std::abs(expected) + 1e-3));
        }
    }
}

} // namespace

TEST(lora_matches_reference_on_every_instruction_set) {
    for_each_isa([] {
        for (DType dtype : kReal) {
            for (DType out_dtype : kReal) {
                for (int64_t m : {1, 2, 3, 5, 19}) {
                    const int64_t k = 7 + 3 * m;
                    const int64_t n = 5 + 11 * m;
                    std::vector<Adapter> adapters;
                    for (int64_t rank : {1, 7, 33}) {
                        adapters.push_back({random_strided({rank, k}, dtype),
                                            random_strided({n, rank}, dtype), 0.25f * float(rank)});
                    }
                    const Tensor in = random_strided({m, k}, dtype);
                    const Tensor before = random_tensor({m, n}, out_dtype);
                    std::vector<int32_t> slots;
                    for (int64_t i = 0; i < m; ++i) {
                        slots.push_back(int32_t(random_int(-1, 2)));
                    }
                    const Tensor out = run(two_threads(), adapters, in, before, slots);
                    check_lora(adapters, in, before, slots, out);
                }
            }
        }
    });
}

TEST(tiles_cover_every_row_once) {
    for (int64_t m : {1, 15, 16, 17, 200, 512, 513, 2000}) {
        for (int64_t n_slots : {1, 3, 40}) {
            std::vector<int32_t> slots;
            for (int64_t i = 0; i < m; ++i) {
                slots.push_back(int32_t(random_int(-1, n_slots - 1)));
            }
            const ops::LoraRows grouped = group(slots, n_slots);
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
