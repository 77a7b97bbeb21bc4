// Random operations on a KvCache against the reference.
#include "naive_kv_cache.hpp"

#include <random>

using namespace kv_test;

namespace {

std::string state_without_tokens(const KvCache &cache) {
    std::string text = cache.dump();
    text.resize(std::min(text.size(), text.find("token[")));
    text += llaisys::text("used ", cache.stats().used, " peak ", cache.stats().peak, " heads");
    for (int32_t s = 0; s < cache.n_streams(); ++s) {
        text += llaisys::text(' ', cache.head(s));
    }
    return text;
}

class Walk {
public:
    Walk(uint32_t seed, int32_t n_streams, int32_t n_cells)
        : random_(seed), cache_(n_streams, n_cells, 40), naive_(n_streams, n_cells, 40),
          bytes_(size_t(n_streams * n_cells), -1) {
        for (int64_t seq = 0; seq < 6; ++seq) {
            const int32_t stream = int32_t(seq) % n_streams;
            CHECK_EQ(cache_.set_stream(seq, stream), LLAISYS_KV_OK);
            naive_.stream_of[seq] = stream;
        }
    }

    void step() {
        const int64_t seq = any(-1, 7), other = any(-1, 7), p0 = any(-2, 40), p1 = any(-2, 42);
        switch (any(0, 9)) {
        case 0:
            CHECK_EQ(cache_.seq_cp(other, seq, p0, p1), naive_.cp(other, seq, p0, p1));
            break;
        case 1:
        case 2:
            CHECK_EQ(cache_.seq_rm(seq, p0, p1), naive_.rm(seq, p0, p1));
            break;
        case 3: {
            const int64_t delta = any(-8, 8);
            CHECK_EQ(cache_.seq_add(seq, p0, p1, delta), naive_.add(seq, p0, p1, delta));
            break;
        }
        case 4:
            if (any(0, 4) == 0) {
                CHECK_EQ(cache_.seq_keep(seq), naive_.keep(seq));
            }
            break;
        default:
            decode();
        }
        compare();
    }

private:
    int64_t any(int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random_);
    }

    Batch random_batch() {
        Batch batch;
        const int64_t n = any(1, 5);
        for (int64_t i = 0; i < n; ++i) {
            std::vector<int64_t> seqs;
            const bool bad = any(0, 60) == 0;
            const int64_t first = bad ? -1 : any(0, 5);
            seqs.push_back(first);
            while (any(0, 3) == 0) { // mostly in the same stream
                seqs.push_back(any(0, 20) == 0 ? any(0, 5)
                                               : (first + any(0, 5) * cache_.n_streams()) % 6);
            }
            batch.add(any(0, 80) == 0 ? any(-2, 45) : any(0, 39), seqs);
        }
        return batch;
    }

    // update, then one to three ubatches; sometimes fails and rolls back.
    void decode() {
        cache_.update(&work_);
        std::vector<int> read;
        for (const int32_t src : work_.copy_src) {
            read.push_back(bytes_[size_t(src)]);
        }
        for (size_t i = 0; i < read.size(); ++i) {
            bytes_[size_t(work_.copy_dst[i])] = read[i];
        }
        check_shifts();

        std::vector<Batch> batches;
        Batch whole;
        for (int64_t n = any(1, 3); n > 0; --n) {
            batches.push_back(random_batch());
            const Batch &b = batches.back();
            for (size_t i = 0; i < b.positions.size(); ++i) {
                whole.add(b.positions[i],
                          {b.seq_ids.begin() + b.offsets[i], b.seq_ids.begin() + b.offsets[i + 1]});
            }
        }
        std::vector<Ubatch> ubatches;
        for (const Batch &b : batches) {
            ubatches.push_back(b.view());
        }
        const std::string before = state_of(cache_);
        const KvStatus status = cache_.prepare(ubatches.data(), int32_t(ubatches.size()), &plans_);
        CHECK_EQ(state_of(cache_), before);
        if (status == LLAISYS_KV_OK && any(0, 3) == 0) {
            fail_after(size_t(any(1, int64_t(ubatches.size()))), ubatches);
            CHECK_EQ(state_of(cache_), before);
            return;
        }
        std::vector<int32_t> expected, slots;
        CHECK_EQ(status, naive_.decode(whole, &expected));
        for (size_t u = 0; status == LLAISYS_KV_OK && u < ubatches.size(); ++u) {
            cache_.apply_ubatch(plans_[u], ubatches[u]);
            slots.insert(slots.end(), plans_[u].slots.begin(), plans_[u].slots.end());
        }
        if (status == LLAISYS_KV_OK) {
            CHECK_EQ(joined(slots), joined(expected));
            for (const int32_t slot : slots) { // "forward" writes the bytes of the new tokens
                bytes_[size_t(slot)] = ++written_;
                naive_.streams[size_t(slot / naive_.n_cells)][size_t(slot % naive_.n_cells)].bytes =
                    written_;
            }
        }
    }

    void fail_after(size_t n, const std::vector<Ubatch> &ubatches) {
        for (size_t u = 0; u < n; ++u) {
            cache_.apply_ubatch(plans_[u], ubatches[u]);
        }
        check_integrity(cache_);
        while (n-- > 0) {
            cache_.rollback_ubatch(plans_[n], ubatches[n]);
        }
    }

    void check_shifts() {
        std::map<int32_t, int64_t> expected, got;
        for (size_t s = 0; s < naive_.streams.size(); ++s) {
            for (int32_t c = 0; c < naive_.n_cells; ++c) {
                Naive::Cell &cell = naive_.streams[s][size_t(c)];
                const int32_t slot = int32_t(s) * naive_.n_cells + c;
                if (!cell.seqs.empty()) {
                    CHECK_EQ(bytes_[size_t(slot)], cell.bytes);
                    if (cell.shift != 0) {
                        expected[slot] = cell.shift;
                    }
                }
                cell.shift = 0;
            }
        }
        for (size_t i = 0; i < work_.shift_slots.size(); ++i) {
            got[work_.shift_slots[i]] = work_.shift_deltas[i];
        }
        CHECK(got == expected);
    }

    void compare() {
        CHECK_EQ(state_without_tokens(cache_), naive_.state());
        check_integrity(cache_);
        const std::vector<int64_t> set{any(0, 6), any(0, 6), any(0, 6)};
        CHECK_EQ(listed(cache_, set), naive_.list(set));
        CHECK_EQ(listed(cache_, {set[0]}), naive_.list({set[0]}));
        int64_t lowest = -1, highest = -1;
        for (const auto &cell : naive_.cells_of(set[0])) {
            if (cell.seqs.count(set[0]) != 0) {
                lowest = lowest < 0 ? cell.pos : std::min(lowest, cell.pos);
                highest = std::max(highest, cell.pos);
            }
        }
        CHECK_EQ(cache_.seq_pos_min(set[0]), lowest);
        CHECK_EQ(cache_.seq_pos_max(set[0]), highest);
    }

    std::mt19937 random_;
    KvCache cache_;
    Naive naive_;
    std::vector<SlotPlan> plans_;
    KvUpdate work_;
    std::vector<int> bytes_; // of each slot: the write that filled it
    int written_ = 0;
};

} // namespace

TEST(random_steps_match_the_reference) {
    for (uint32_t seed = 0; seed < 6; ++seed) {
        Walk walk(seed, 1 + int32_t(seed % 3), seed < 3 ? 13 : 70);
        for (int i = 0; i < 2000; ++i) {
            walk.step();
        }
    }
}
