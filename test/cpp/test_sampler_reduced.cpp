// Sampling from reduced rows and on the device equals sampling from full rows.
#include "sampler_rows.hpp"

#include "runtime/runner/device_sampler.hpp"
#include "runtime/runner/sampler_chain.hpp"

#include <cmath>
#include <numeric>

using namespace sampler_test;

namespace {

// Rows of logits and a naive implementation of the device's reduction.
struct NaiveDevice {
    NaiveDevice(int64_t vocabulary, std::vector<float> rows)
        : vocab(vocabulary), k(std::min<int64_t>(vocabulary, kMaxTopK)), logits(std::move(rows)) {}

    int64_t vocab, k;
    std::vector<float> logits; // [outputs, vocab]

    std::vector<int32_t> ids, raw_ids, picks;
    std::vector<float> values, raw_values;
    std::vector<double> sums, raw_sums;
    std::vector<float> fetched;
    size_t n_fetched = 0;

    void best_of(const float *row, std::vector<int32_t> *best_ids, std::vector<float> *best) const {
        const auto at = [&](int32_t i) { return row[i] == row[i] ? row[i] : -kInf; };
        std::vector<int32_t> order(static_cast<size_t>(vocab));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int32_t a, int32_t b) { return at(a) > at(b); });
        for (int64_t i = 0; i < k; ++i) {
            best_ids->push_back(order[size_t(i)]);
            best->push_back(at(order[size_t(i)]));
        }
    }

    // The sum of the weights and the picked index.
    std::pair<double, int32_t> weigh_row(const float *row, float temperature, double u) const {
        std::vector<float> weights(static_cast<size_t>(vocab));
        std::vector<double> blocks(size_t((vocab + kWeightBlock - 1) / kWeightBlock));
        const float max = max_of(row, vocab);
        if (max == -kInf) {
            return {0, -1};
        }
        const double sum =
            softmax_weights(row, vocab, max, temperature, weights.data(), blocks.data());
        return {sum, int32_t(pick(weights.data(), blocks.data(), vocab, u * sum))};
    }

    std::vector<float> adjusted(const SamplingPlan &plan, size_t r) const {
        const float *from = logits.data() + plan.rows[r] * vocab;
        std::vector<float> row(from, from + vocab);
        const int64_t words = (vocab + 31) / 32;
        for (int64_t i = 0; plan.mask_rows[r] >= 0 && i < vocab; ++i) {
            const uint32_t word = plan.masks[plan.mask_rows[r] * words + i / 32];
            row[size_t(i)] = (word >> (i % 32) & 1u) != 0 ? row[size_t(i)] : -kInf;
        }
        for (int32_t i = plan.bias_offsets[r]; i < plan.bias_offsets[r + 1]; ++i) {
            CHECK(i == plan.bias_offsets[r] ||
                  plan.bias_ids[size_t(i)] >= plan.bias_ids[size_t(i - 1)]);
            row[size_t(plan.bias_ids[size_t(i)])] += plan.bias_values[size_t(i)];
        }
        for (int32_t i = plan.history_offsets[r]; i < plan.history_offsets[r + 1]; ++i) {
            float &x = row[size_t(plan.history_tokens[size_t(i)])];
            const float sampled = float(plan.history_sampled[size_t(i)]);
            x = x > 0 ? x / plan.penalties[3 * r] : x * plan.penalties[3 * r];
            x -= plan.penalties[3 * r + 2] * sampled;
            x -= sampled > 0 ? plan.penalties[3 * r + 1] : 0.0f;
        }
        return row;
    }

    ReducedRows reduce(const SamplingPlan &plan) {
        for (size_t at = 0; at < logits.size(); at += size_t(vocab)) {
            best_of(logits.data() + at, &raw_ids, &raw_values);
        }
        for (size_t r = 0; r < plan.rows.size(); ++r) {
            const std::vector<float> row = adjusted(plan, r);
            best_of(row.data(), &ids, &values);
            const auto found = weigh_row(row.data(), plan.temperatures[r], plan.uniforms[r]);
            sums.push_back(found.first);
            picks.push_back(found.second);
            raw_sums.push_back(weigh_row(logits.data() + plan.rows[r] * vocab, 1, 0).first);
        }
        ReducedRows found;
        found.k = k;
        found.is_adjusted = plan.adjusts;
        found.ids = plan.adjusts ? ids.data() : raw_ids.data();
        found.values = plan.adjusts ? values.data() : raw_values.data();
        found.sums = plan.needs_sums || plan.needs_picks ? sums.data() : nullptr;
        found.picks = plan.needs_picks ? picks.data() : nullptr;
        if (plan.needs_raw) {
            found.raw_ids = raw_ids.data();
            found.raw_values = raw_values.data();
            found.raw_sums = raw_sums.data();
        }
        return found;
    }

    const float *fetch(const std::vector<int32_t> &rows) {
        n_fetched += rows.size();
        for (const int32_t row : rows) {
            const float *from = logits.data() + row * vocab;
            fetched.insert(fetched.end(), from, from + vocab);
        }
        return fetched.data();
    }
};

// A random value, neutral four times out of five.
float sometimes(std::mt19937 &random, float neutral, float value) {
    return random() % 5 == 0 ? value : neutral;
}

Row random_row(std::mt19937 &random, int64_t vocab, int32_t n_outputs) {
    constexpr float kTemperatures[] = {0, 0.3f, 1, 1, 0.7f, 2};
    Row row;
    row.output = int32_t(random() % uint32_t(n_outputs));
    row.seed = random() % 3;
    row.position = int64_t(random() % 1000);
    row.seq = random() % 3 == 0 ? 7 : 8; // 7 has a history
    row.temperature = kTemperatures[random() % 6];
    row.top_k = random() % 3 == 0 ? int32_t(1 + random() % uint64_t(vocab + 20)) : 0;
    row.top_p = sometimes(random, 1, 0.05f + float(random() % 90) / 100);
    row.min_p = sometimes(random, 0, 0.001f * float(1 + random() % 300));
    row.typical_p = random() % 20 == 0 ? 0.6f : 1.0f;
    row.top_n_sigma = random() % 20 == 0 ? 1.5f : 0.0f;
    row.xtc_probability = random() % 10 == 0 ? 0.5f : 0.0f;
    row.dynatemp_range = random() % 20 == 0 ? 0.5f : 0.0f;
    row.post_sampling_probs = random() % 20 == 0 ? 1 : 0;
    row.repetition = sometimes(random, 1, 1.3f);
    row.presence = sometimes(random, 0, 0.5f);
    row.frequency = sometimes(random, 0, -0.25f);
    row.n_logprobs = random() % 4 == 0 ? int32_t(random() % uint64_t(vocab + 1)) : -1;
    row.mask = random() % 4 == 0 ? 0 : -1;
    for (uint32_t i = 0; random() % 4 == 0 && i < 5; ++i) { // several for one token
        row.bias.emplace_back(int32_t(random() % uint64_t(std::min<int64_t>(vocab, 3))),
                              float(int(random() % 7)) * 0.3f - 1);
    }
    if (random() % 4 == 0) {
        std::shuffle(row.chain.begin(), row.chain.end(), random);
        row.chain.resize(random() % 9);
    }
    return row;
}

std::vector<float> some_logits(std::mt19937 &random, int64_t vocab, int32_t n_outputs) {
    std::vector<float> logits = random_logits(random, size_t(vocab * n_outputs), 3);
    for (float &x : logits) {
        x = random() % 2 == 0 ? std::round(x * 4) / 4 : x; // with ties
        x = random() % 50 == 0 ? (random() % 2 == 0 ? kNaN : -kInf) : x;
    }
    for (int64_t i = 0; i < vocab; ++i) {
        logits[size_t(i)] =
            i % 7 == 0 ? logits[size_t(i)] : -kInf; // few finite logits in the first row
    }
    for (int32_t row = 0; row < n_outputs; ++row) {
        logits[size_t(row * vocab)] = 2;
    }
    return logits;
}

} // namespace

TEST(sampling_from_reduced_rows_equals_sampling_from_full_rows) {
    std::mt19937 random(5);
    size_t n_fetched = 0;
    size_t n_sampled = 0;
    for (const int64_t vocab : {1, 5, 200, 256, 257, 511, 513, 3000}) {
        constexpr int32_t kOutputs = 3;
        Sampler sampler(stream(), vocab);
        const std::vector<int64_t> prompt{0, vocab / 2, vocab - 1};
        sampler.reset(7, prompt.data(), 3);
        sampler.accept(7, prompt.data(), 2);
        std::vector<uint32_t> mask(size_t((vocab + 31) / 32), 0xDDDDDDDDu);
        for (int round = 0; round < 40; ++round) {
            std::vector<Row> rows;
            for (int i = 0; i < 12; ++i) {
                rows.push_back(random_row(random, vocab, kOutputs));
            }
            const Columns columns(rows, mask);
            const LlaisysSamplingMetadata view = columns.view(vocab);
            NaiveDevice device(vocab, some_logits(random, vocab, kOutputs));
            std::vector<int32_t> whole(rows.size()), reduced(rows.size());
            sampler.sample(device.logits.data(), kOutputs, view, whole.data());
            std::vector<std::vector<float>> logprobs;
            for (int32_t r = 0; r < int32_t(rows.size()); ++r) {
                const LlaisysLogprobs l = sampler.logprobs(r);
                logprobs.emplace_back(l.logprobs, l.logprobs + l.n);
                logprobs.back().push_back(float(l.sampled_rank));
                logprobs.back().insert(logprobs.back().end(), l.ids, l.ids + l.n);
            }
            SamplingPlan plan;
            if (!sampler.plan(view, kOutputs, device.k, &plan)) {
                continue;
            }
            const ReducedRows found = device.reduce(plan);
            const auto fetch = [&](const std::vector<int32_t> &outputs) {
                return device.fetch(outputs);
            };
            const int32_t n_whole = sampler.sample_reduced(found, fetch, view, reduced.data());
            CHECK_EQ(n_whole, int32_t(device.n_fetched));
            CHECK(whole == reduced);
            for (int32_t r = 0; r < int32_t(rows.size()); ++r) {
                const LlaisysLogprobs l = sampler.logprobs(r);
                std::vector<float> now(l.logprobs, l.logprobs + l.n);
                now.push_back(float(l.sampled_rank));
                now.insert(now.end(), l.ids, l.ids + l.n);
                CHECK(now == logprobs[size_t(r)]);
            }
            n_fetched += device.n_fetched;
            n_sampled += rows.size();
        }
    }
    CHECK(n_sampled > 3000);
    CHECK(n_fetched > n_sampled / 50); // both paths ran
    CHECK(n_fetched < n_sampled / 2);
}

// Uses the CPU reference of the device operators. The last token of a history is either pending on
// the device or known to the Sampler.
TEST(device_sampler_equals_host_sampler) {
    std::mt19937 random(17);
    int n_maybe = 0;
    int n_made = 0;
    for (const int64_t vocab : {1, 5, 200, 256, 257, 513, 3000}) {
        constexpr int32_t kOutputs = 3;
        Sampler sampler(stream(), vocab), behind(stream(), vocab);
        DeviceSampler device(stream());
        const std::vector<int64_t> prompt{0, vocab / 2, vocab - 1};
        for (Sampler *each : {&sampler, &behind}) {
            each->reset(7, prompt.data(), 3);
            each->accept(7, prompt.data(), 2);
        }
        const int64_t last = int64_t(random() % uint64_t(vocab));
        sampler.accept(7, &last, 1);
        std::vector<uint32_t> mask(size_t((vocab + 31) / 32), 0xDDDDDDDDu);
        const Tensor rows_before = Tensor::create({2, vocab}, LLAISYS_DTYPE_F32);
        rows_before.as<float>()[vocab + last] = 1;
        for (int round = 0; round < (vocab > 513 ? 600 : 120); ++round) {
            std::vector<Row> rows;
            for (int i = 0; i < 4; ++i) {
                rows.push_back(random_row(random, vocab, kOutputs));
            }
            const Columns columns(rows, mask);
            const LlaisysSamplingMetadata view = columns.view(vocab);
            std::vector<int32_t> late;
            for (const Row &row : rows) {
                late.push_back(row.seq == 7 ? 1 : -1);
            }
            SamplingPlan plan;
            behind.plan(view, kOutputs, DeviceSampler::max_top_k(vocab), &plan, late.data());
            if (plan.async == SamplingPlan::Async::no) {
                continue;
            }
            std::vector<float> values = some_logits(random, vocab, kOutputs);
            for (float &x : values) {
                x = round % 2 == 0 ? x : x / 4; // flat: top_p and min_p keep more than the top k
            }
            Tensor logits = Tensor::create({kOutputs, vocab}, LLAISYS_DTYPE_F32);
            logits.load(values.data(), size_t(logits.bytes()));
            std::vector<int32_t> whole(rows.size()), made(rows.size(), -1);
            device.queue(rows_before); // its row 1 samples `last`
            const int slot = device.queue(logits, plan);
            CHECK(device.finish(slot, view, made.data()));
            n_maybe += int(plan.async == SamplingPlan::Async::maybe);
            ++n_made;
            sampler.sample(values.data(), kOutputs, view, whole.data());
            CHECK(whole == made);
            CHECK_EQ(device.sampled().as<int64_t>()[device.sampled_row(view, 3)], made[3]);
            if (device.found(slot).ids == nullptr) {
                continue;
            }
            behind.record_sampled(device.found(slot), view, made.data());
            for (int32_t r = 0; r < int32_t(rows.size()); ++r) {
                const LlaisysLogprobs a = sampler.logprobs(r), b = behind.logprobs(r);
                CHECK_EQ(a.n, b.n);
                CHECK_EQ(a.sampled_rank, b.sampled_rank);
                CHECK(std::equal(a.ids, a.ids + a.n, b.ids));
                CHECK(std::equal(a.logprobs, a.logprobs + a.n, b.logprobs));
            }
        }
    }
    CHECK(n_made > 200);
    CHECK(n_maybe > 50);
}

TEST(row_without_an_allowed_token_raises_the_same_error_from_reduced_rows) {
    Sampler sampler(stream(), 4);
    Row row;
    row.bias = {{0, -kInf}, {1, -kInf}, {2, -kInf}, {3, -kInf}};
    const Columns columns({row});
    NaiveDevice device(4, {1, 2, 3, 4});
    SamplingPlan plan;
    CHECK(sampler.plan(columns.view(4), 1, 4, &plan));
    const ReducedRows found = device.reduce(plan);
    const auto fetch = [&](const std::vector<int32_t> &rows) { return device.fetch(rows); };
    int32_t id = 77;
    CHECK_THROWS(sampler.sample_reduced(found, fetch, columns.view(4), &id), "no token left");
    CHECK_EQ(id, 77);
}

TEST(reduction_of_each_chain) {
    const SamplerHistory::Entries history{{1, 0}};
    const auto kind = [&](auto change) {
        Row row;
        change(row);
        RowParams params{static_cast<const RowNumbers &>(row)};
        params.chain = row.chain.data();
        params.n_chain = int32_t(row.chain.size());
        params.history = &history;
        return reduction_of(params, 64);
    };
    CHECK_EQ(int(kind([](Row &) {}).kind), int(Reduction::pick));
    CHECK_EQ(kind([](Row &row) { row.temperature = 0.5f; }).temperature, 0.5f);
    CHECK_EQ(int(kind([](Row &row) { row.temperature = 0; }).kind), int(Reduction::best));
    CHECK_EQ(int(kind([](Row &row) { row.top_k = 64; }).kind), int(Reduction::top_k));
    CHECK_EQ(int(kind([](Row &row) { row.top_k = 65; }).kind), int(Reduction::full_row));
    CHECK_EQ(int(kind([](Row &row) { row.top_p = 0.5f; }).kind), int(Reduction::top_p));
    CHECK_EQ(int(kind([](Row &row) { row.min_p = 0.5f; }).kind), int(Reduction::min_p));
    CHECK_EQ(int(kind([](Row &row) { row.top_n_sigma = 1; }).kind), int(Reduction::full_row));
    CHECK_EQ(int(kind([](Row &row) { row.typical_p = 0.5f; }).kind), int(Reduction::full_row));
    CHECK_EQ(int(kind([](Row &row) { row.xtc_probability = 1; }).kind), int(Reduction::full_row));
    CHECK_EQ(int(kind([](Row &row) { row.dynatemp_range = 1; }).kind), int(Reduction::full_row));
    CHECK_EQ(int(kind([](Row &row) { row.post_sampling_probs = 1; }).kind),
             int(Reduction::full_row));
    CHECK_EQ(int(kind([](Row &row) { row.mirostat = 2, row.chain.push_back(kMirostat); }).kind),
             int(Reduction::full_row));
    const auto penalised = kind([](Row &row) { row.repetition = 2, row.temperature = 0; });
    CHECK(penalised.is_penalised);
    CHECK_EQ(int(penalised.kind), int(Reduction::best));
    const auto late = kind([](Row &row) {
        row.chain = {kTemperature, kPenalties};
        row.repetition = 2, row.temperature = 0.5f;
    });
    CHECK_EQ(int(late.kind), int(Reduction::full_row));
}
