// Sampling on the device equals sampling on the host.
#include "sample_rows_reference.hpp"
#include "sampler_rows.hpp"

#include "runtime/runner/device_sampler.hpp"
#include "runtime/runner/sampler_chain.hpp"

#include <cmath>

using namespace sampler_test;

namespace {

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

void check_logprobs(const Sampler &host, const Sampler &device, size_t n_rows) {
    for (int32_t r = 0; r < int32_t(n_rows); ++r) {
        const LlaisysLogprobs a = host.logprobs(r), b = device.logprobs(r);
        CHECK_EQ(a.n, b.n);
        CHECK_EQ(a.n > 0 ? a.sampled_rank : 0, b.n > 0 ? b.sampled_rank : 0);
        CHECK(std::equal(a.ids, a.ids + a.n, b.ids));
        CHECK(std::equal(a.logprobs, a.logprobs + a.n, b.logprobs));
    }
}

} // namespace

// Uses the CPU reference of the device operators. The last token of a history is either pending on
// the device or known to the Sampler. The host samples the rows that the device does not decide.
TEST(device_sampler_equals_host_sampler) {
    std::mt19937 random(17);
    int n_maybe = 0;
    size_t n_rows = 0;
    size_t n_on_host = 0;
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
            behind.plan(view, kOutputs, &plan, late.data());
            std::vector<float> values = some_logits(random, vocab, kOutputs);
            for (float &x : values) {
                x = round % 2 == 0 ? x : x / 4; // flat: top_p and min_p keep more than the top k
            }
            Tensor logits = Tensor::create({kOutputs, vocab}, LLAISYS_DTYPE_F32);
            logits.load(values.data(), size_t(logits.bytes()));
            std::vector<int32_t> whole(rows.size()), made(rows.size(), -1);
            SamplingPlan greedy;
            greedy.is_greedy = true;
            device.queue(rows_before, greedy); // its row 1 samples `last`
            const int slot = device.queue(logits, plan);
            std::vector<int32_t> undecided;
            device.finish(slot, view, made.data(), &undecided);
            const bool is_async = plan.async == SamplingPlan::Async::yes;
            CHECK(plan.n_on_host <= int32_t(undecided.size()));
            CHECK(!is_async || undecided.empty());
            n_maybe += int(plan.async == SamplingPlan::Async::maybe);
            n_rows += rows.size();
            n_on_host += undecided.size();
            sampler.sample(values.data(), kOutputs, view, whole.data());
            behind.record_sampled(device.found(slot), view, made.data());
            if (!undecided.empty()) {
                std::vector<int32_t> outputs;
                for (const int32_t r : undecided) {
                    outputs.push_back(rows[size_t(r)].output);
                }
                // The host samples after the pending token is known.
                Sampler known(stream(), vocab);
                known.reset(7, prompt.data(), 3);
                known.accept(7, prompt.data(), 2);
                known.accept(7, &last, 1);
                known.record_sampled(device.found(slot), view, made.data());
                known.sample_rows(device.copy_rows_to_host(logits, outputs), undecided, view,
                                  made.data());
                check_logprobs(sampler, known, rows.size());
            } else {
                check_logprobs(sampler, behind, rows.size());
                CHECK_EQ(device.sampled().as<int64_t>()[device.sampled_row(view, 3)], made[3]);
            }
            CHECK(whole == made);
        }
    }
    CHECK(n_on_host > n_rows / 50); // both ran
    CHECK(n_on_host < n_rows / 2);
    CHECK(n_maybe > 50);
}
TEST(row_without_an_allowed_token_is_left_to_the_host) {
    Sampler sampler(stream(), 4);
    DeviceSampler device(stream());
    Row row;
    row.bias = {{0, -kInf}, {1, -kInf}, {2, -kInf}, {3, -kInf}};
    const Columns columns({row});
    const LlaisysSamplingMetadata view = columns.view(4);
    const Tensor logits = Tensor::create({1, 4}, LLAISYS_DTYPE_F32);
    SamplingPlan plan;
    sampler.plan(view, 1, &plan);
    int32_t id = 77;
    std::vector<int32_t> undecided;
    const int slot = device.queue(logits, plan);
    device.finish(slot, view, &id, &undecided);
    CHECK(undecided == std::vector<int32_t>{0});
    sampler.record_sampled(device.found(slot), view, &id);
    const float *rows = device.copy_rows_to_host(logits, {0});
    CHECK_THROWS(sampler.sample_rows(rows, undecided, view, &id), "no token left");
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
