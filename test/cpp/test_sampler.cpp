// Each logits processor of the sampler, and independence of batch and threads. See also
// test_sampler_math.cpp, test_sampler_distributions.cpp, test_sampler_logprobs.cpp,
// test_sampler_input.cpp and, for the device sampler, test_sampler_reduced.cpp.
#include "sampler_rows.hpp"

#include <cmath>

using namespace sampler_test;

// -- Processors ----------------------------------------------------------------------------------

TEST(temperature_zero_takes_the_most_likely_and_lowest_id) {
    Row row;
    row.temperature = 0;
    CHECK_EQ(sample_one({1, 5, 5, 2}, row), 1);
    row.top_k = 3;
    row.top_p = 0.1f;
    row.min_p = 1;
    CHECK_EQ(sample_one({1, 5, 5, 2}, row), 1);
    row.bias = {{1, -kInf}, {3, 3.5f}};
    CHECK_EQ(sample_one({1, 5, 5, 2}, row), 3);
    row.chain = {};
    row.bias.clear();
    row.seed = 1; // the temperature has no effect without its processor
    std::vector<int> seen(4);
    Sampler sampler(stream(), 4);
    for (int64_t i = 0; i < 200; ++i) {
        row.position = i;
        seen[size_t(sample(sampler, {1, 1, 1, 1}, {row})[0])] += 1;
    }
    CHECK(*std::min_element(seen.begin(), seen.end()) > 10);
}

TEST(ties_at_the_cutoff_keep_the_lowest_ids) {
    const std::vector<float> logits{1, 3, 2, 2, 2, 0};
    const auto support = [&](const Row &row) { return sampled_ids(logits, row); };
    Row row;
    row.top_k = 3;
    CHECK_EQ(support(row), ".xxx..");
    row.top_k = 1;
    CHECK_EQ(support(row), ".x....");
    row.top_k = 0;
    row.top_p = 0.6f; // 0.417 + 0.153 + 0.153
    CHECK_EQ(support(row), ".xxx..");
    row.top_p = 1e-6f; // at least one
    CHECK_EQ(support(row), ".x....");
    row.top_p = 1;
    row.min_p = 1;
    CHECK_EQ(support(row), ".x....");
    row.min_p = 0.3f; // e^-1 = 0.37 of the best
    CHECK_EQ(support(row), ".xxxx.");
    row.min_p = 0;
    CHECK_EQ(support(row), "xxxxxx");
}

TEST(typical_p_keeps_tokens_near_the_entropy) {
    // p = 0.5, 0.25, 0.125, 0.0625, 0.0625: 1.875 bits of entropy, so 0.25 (2 bits) is the nearest,
    // then 0.5 (0.875 away), then 0.125 (1.125 away).
    const float ln2 = std::log(2.0f);
    const std::vector<float> logits{4 * ln2, 3 * ln2, 2 * ln2, ln2, ln2};
    const auto support = [&](float typical_p) {
        Row row;
        row.typical_p = typical_p;
        return sampled_ids(logits, row);
    };
    CHECK_EQ(support(0.01f), ".x..."); // at least one, and not the most likely
    CHECK_EQ(support(0.24f), ".x...");
    CHECK_EQ(support(0.7f), "xx...");
    CHECK_EQ(support(0.8f), "xxx..");
    CHECK_EQ(support(1), "xxxxx");
    Row greedy; // an earlier truncation may remove the most likely token
    greedy.temperature = 0;
    greedy.typical_p = 0.2f;
    greedy.chain = {kTypical, kTemperature};
    CHECK_EQ(sample_one(logits, greedy), 1);
}

TEST(top_n_sigma_keeps_logits_near_the_largest) {
    // The finite logits have the mean 2 and a standard deviation of 2.24.
    const std::vector<float> logits{5, -kInf, 1, 3, kNaN, -1};
    const auto support = [&](float n, float temperature) {
        Row row;
        row.top_n_sigma = n;
        row.temperature = temperature;
        return sampled_ids(logits, row);
    };
    for (const float temperature : {1.0f, 3.0f}) { // both sides scale with it
        CHECK_EQ(support(0.5f, temperature), "x.....");
        CHECK_EQ(support(1, temperature), "x..x..");
        CHECK_EQ(support(1.9f, temperature), "x.xx..");
    }
    CHECK_EQ(support(100, 3), "x.xx.x");
    CHECK_EQ(support(0, 3), "x.xx.x");
    Row row;
    row.top_n_sigma = 1;
    CHECK_EQ(sample_one({1, kInf, 2}, row), 1);
    CHECK(sample_one({2, 2, 2}, row) >= 0);
}

TEST(xtc_keeps_the_least_likely_of_the_top_tokens) {
    const float ln2 = std::log(2.0f);
    const std::vector<float> logits{ln2, 4 * ln2, 2 * ln2, 3 * ln2, ln2}; // 1/2, 1/4, 1/8, ...
    Row row;
    row.temperature = 0;
    row.chain = {kXtc, kTemperature};
    row.xtc_probability = 1;
    row.xtc_threshold = 0.2f; // the two best are above it
    CHECK_EQ(sample_one(logits, row), 3);
    row.xtc_threshold = 0.1f; // and the third
    CHECK_EQ(sample_one(logits, row), 2);
    row.xtc_threshold = 0.3f; // only one is: it is kept
    CHECK_EQ(sample_one(logits, row), 1);
    row.xtc_threshold = 0.6f; // more than half: neutral
    CHECK_EQ(sample_one(logits, row), 1);
    row.xtc_threshold = 0.2f;
    row.xtc_probability = 0.3f;
    int times = 0;
    for (row.position = 0; row.position < 2000; ++row.position) {
        times += sample_one(logits, row) == 3;
    }
    CHECK(times > 500 && times < 700);
}

TEST(the_order_of_the_chain_matters) {
    Sampler sampler(stream(), 3);
    const std::vector<float> logits{2, 1.9f, -3};
    const int64_t token = 0;
    sampler.accept(1, &token, 1);
    Row row;
    row.seq = 1;
    row.top_k = 1;
    row.presence = 5;
    row.chain = {kTopK, kPenalties};
    CHECK_EQ(sample(sampler, logits, {row})[0], 0);
    row.chain = {kPenalties, kTopK};
    CHECK_EQ(sample(sampler, logits, {row})[0], 1);
    row.temperature = 0; // also where a temperature of 0 ends the chain
    row.chain = {kTopK, kPenalties, kTemperature};
    CHECK_EQ(sample(sampler, logits, {row})[0], 0);
    row.chain = {kTemperature, kPenalties};
    CHECK_EQ(sample(sampler, logits, {row})[0], 0);
    row.chain = {kPenalties, kTemperature, kTopK};
    CHECK_EQ(sample(sampler, logits, {row})[0], 1);
}

TEST(penalties_count_prompt_and_sampled_tokens_as_documented) {
    Sampler sampler(stream(), 4);
    const std::vector<int64_t> prompt{0, 0, 1}, sampled{1, 2, 2};
    Row row;
    row.seq = 9;
    row.temperature = 0;
    row.n_logprobs = 0;
    const auto best = [&](std::vector<float> logits) { return sample(sampler, logits, {row})[0]; };
    sampler.reset(9, prompt.data(), 3);
    sampler.accept(9, sampled.data(), 3);
    row.presence = 1; // 0 was in the prompt only
    CHECK_EQ(best({1, 1.9f, 1.9f, -9}), 0);
    CHECK_EQ(best({1, 2.1f, 1.9f, -9}), 1);
    row.presence = 0;
    row.frequency = 1; // 1 was sampled once, 2 twice
    CHECK_EQ(best({1, 1.9f, 2.9f, -9}), 0);
    CHECK_EQ(best({1, 1.5f, 3.1f, -9}), 2);
    row.frequency = 0;
    row.repetition = 2; // all of the history, the sign decides
    CHECK_EQ(best({3, 3, 3, 1.6f}), 3);
    CHECK_EQ(best({-1, -1.2f, -1.3f, -1.9f}), 3);
    CHECK_EQ(best({-1, -1.2f, -1.3f, -2.1f}), 0);
    sampler.reset(9, nullptr, 0); // empty
    CHECK_EQ(best({3, 3, 3, 1.6f}), 0);
    sampler.accept(9, sampled.data(), 1);
    CHECK_EQ(best({1, 3, 1.2f, 1.6f}), 3);
    sampler.forget(9);
    CHECK_EQ(best({1, 3, 1.2f, 1.6f}), 1);
    sampler.forget(77); // unknown
}

TEST(sampling_does_not_change_the_history) {
    Sampler sampler(stream(), 3);
    const int64_t token = 1;
    sampler.accept(0, &token, 1);
    Row row;
    row.presence = 0.5f;
    row.seed = 4;
    const std::vector<int32_t> first = sample(sampler, {1, 1, 1}, std::vector<Row>(50, row));
    CHECK(first == sample(sampler, {1, 1, 1}, std::vector<Row>(50, row)));
}

TEST(masks_and_bans_leave_only_allowed_tokens) {
    std::mt19937 random(2);
    for (const int64_t vocab : {31, 32, 33, 65}) {
        const size_t words = size_t((vocab + 31) / 32);
        Sampler sampler(stream(), vocab);
        const std::vector<float> logits = random_logits(random, size_t(vocab), 1);
        std::vector<uint32_t> masks(2 * words, ~0u); // row 1: only the last token
        std::fill(masks.begin() + int64_t(words), masks.end(), 0);
        masks[words + size_t((vocab - 1) / 32)] = 1u << ((vocab - 1) % 32);
        std::vector<Row> rows(3);
        rows[1].mask = 1;
        rows[2].mask = 0;
        const std::vector<int32_t> ids = sample(sampler, logits, rows, masks);
        CHECK_EQ(ids[1], int32_t(vocab - 1));
        CHECK_EQ(ids[2], ids[0]);
        rows[1].bias = {{int32_t(vocab - 1), -kInf}};
        CHECK_THROWS(sample(sampler, logits, rows, masks), "row 1", "no token left");
        rows[1].bias = {{0, 100.0f}}; // a bias does not restore a masked token
        CHECK_EQ(sample(sampler, logits, rows, masks)[1], int32_t(vocab - 1));
    }
}

TEST(row_without_an_allowed_token_is_an_error_for_any_chain) {
    for (const uint8_t kind : {kPenalties, kTemperature, kTopK, kTopP, kMinP}) {
        for (const float temperature : {0.0f, 1.0f}) {
            Row row;
            row.chain = {kind};
            row.temperature = temperature;
            row.top_k = 1;
            row.top_p = 0.5f;
            row.min_p = 0.5f;
            CHECK_THROWS(sample_one({-kInf, kNaN, -kInf}, row), "row 0", "no token left");
            CHECK_THROWS(sample_one({kNaN, kNaN}, row), "internal error", "output row 0", "NaN");
            CHECK_THROWS(sample_one({kNaN}, row), "NaN");
            CHECK_EQ(sample_one({-kInf, kNaN, -200.0f}, row), 2);
            CHECK_EQ(sample_one({1, kInf, 2}, row), 1);
        }
    }
}

TEST(extreme_logits_and_temperatures_stay_finite) {
    Row row;
    row.temperature = std::numeric_limits<float>::denorm_min();
    CHECK_EQ(sample_one({1, 3, 2.9999f}, row), 1);
    row.temperature = std::numeric_limits<float>::max();
    CHECK(sample_one({-3e38f, 3e38f, 0}, row) >= 0);
    row.temperature = 1;
    CHECK_EQ(sample_one({-3e38f, 3e38f, 0}, row), 1);
    CHECK_EQ(sample_one({7}, row), 0);
}

TEST(row_is_greedy_when_no_processor_before_temperature_zero_changes_the_best_token) {
    Sampler sampler(stream(), 4);
    const int64_t history[] = {1};
    sampler.reset(7, history, 1);
    const auto is_greedy = [&](const Row &row) {
        const std::vector<uint32_t> masks{0xF};
        SamplingPlan plan;
        sampler.plan(Columns({Row(row), row}, masks).view(4), 1, &plan);
        return plan.is_greedy;
    };
    Row greedy;
    greedy.temperature = 0;
    CHECK(is_greedy(greedy));
    CHECK(!is_greedy(Row()));
    const auto changed = [&](auto change) {
        Row row = greedy;
        change(row);
        return is_greedy(row);
    };
    CHECK(changed([](Row &row) { row.top_k = 3, row.min_p = 1, row.typical_p = 0.1f; }));
    CHECK(changed([](Row &row) { row.chain = {kTopK, kTemperature}, row.top_k = 3; }));
    CHECK(changed([](Row &row) { row.chain = {kTypical, kTemperature}; }));
    CHECK(!changed([](Row &row) { row.chain = {kTypical, kTemperature}, row.typical_p = 0.1f; }));
    CHECK(!changed([](Row &row) { row.chain = {kXtc, kTemperature}, row.xtc_probability = 1; }));
    CHECK(!changed([](Row &row) { row.chain = {kTopK}; }));
    CHECK(changed([](Row &row) { row.repetition = 2; })); // its sequence has no history
    CHECK(!changed([](Row &row) { row.repetition = 2, row.seq = 7; }));
    CHECK(!changed([](Row &row) { row.n_logprobs = 0; }));
    CHECK(!changed([](Row &row) { row.mask = 0; }));
    CHECK(!changed([](Row &row) { row.bias = {{1, 1.0f}}; }));
    CHECK(is_greedy([] {
        Row row;
        row.top_k = 1;
        return row;
    }()));
}

// -- Independence --------------------------------------------------------------------------------

TEST(sampling_is_independent_of_batch_and_threads) {
    std::mt19937 random(21);
    const int64_t vocab = 1501;
    const std::vector<float> logits = random_logits(random, size_t(6 * vocab), 2);
    std::vector<int64_t> tokens{5, 5, 900};
    std::vector<Row> rows(40);
    for (size_t r = 0; r < rows.size(); ++r) {
        rows[r].output = int32_t(random() % 6);
        rows[r].temperature = r % 5 == 0 ? 0 : 0.5f + float(r % 4);
        rows[r].top_k = r % 3 == 0 ? 50 : 0;
        rows[r].top_p = r % 4 == 0 ? 0.9f : 1;
        rows[r].min_p = r % 7 == 0 ? 0.05f : 0;
        rows[r].repetition = r % 2 == 0 ? 1.5f : 1;
        rows[r].seed = random();
        rows[r].position = int64_t(r);
        rows[r].n_logprobs = int32_t(r % 4) - 1;
        rows[r].seq = int64_t(r % 2);
    }
    std::vector<int32_t> alone;
    std::vector<std::vector<float>> values;
    Sampler single(stream(1), vocab);
    single.accept(0, tokens.data(), 3);
    for (const Row &row : rows) {
        alone.push_back(sample(single, logits, {row})[0]);
        const LlaisysLogprobs l = single.logprobs(0);
        CHECK_EQ(l.n, row.n_logprobs + 1);
        values.emplace_back(l.logprobs, l.logprobs + l.n);
    }
    for (int n_threads = 1; n_threads <= 3; ++n_threads) {
        Sampler sampler(stream(n_threads), vocab);
        sampler.accept(0, tokens.data(), 3);
        for (int round = 0; round < 20; ++round) {
            std::vector<size_t> order(rows.size());
            std::generate(order.begin(), order.end(), [n = size_t(0)]() mutable { return n++; });
            std::shuffle(order.begin(), order.end(), random);
            order.resize(1 + random() % order.size());
            std::vector<Row> batch;
            for (const size_t i : order) {
                batch.push_back(rows[i]);
            }
            const std::vector<int32_t> ids = sample(sampler, logits, batch);
            for (size_t i = 0; i < order.size(); ++i) {
                CHECK_EQ(ids[i], alone[order[i]]);
                const LlaisysLogprobs l = sampler.logprobs(int32_t(i));
                CHECK(std::vector<float>(l.logprobs, l.logprobs + l.n) == values[order[i]]);
            }
        }
    }
}

TEST(null_columns_are_neutral) {
    std::mt19937 random(8);
    const std::vector<float> logits = random_logits(random, 3 * 50, 1);
    Sampler sampler(stream(), 50);
    LlaisysSamplingMetadata plain = {};
    plain.struct_size = sizeof plain;
    plain.n_rows = 3;
    int32_t ids[3];
    sampler.sample(logits.data(), 3, plain, ids);
    std::vector<Row> rows(3);
    for (int32_t r = 0; r < 3; ++r) {
        rows[size_t(r)].output = r;
    }
    CHECK(sample(sampler, logits, rows) == std::vector<int32_t>(ids, ids + 3));
    CHECK_EQ(sampler.logprobs(2).n, 0);
    plain.n_rows = 0;
    sampler.sample(nullptr, 0, plain, nullptr); // nothing to do
    CHECK_THROWS(sampler.logprobs(0), "[0, 0)", "got 0");
}
