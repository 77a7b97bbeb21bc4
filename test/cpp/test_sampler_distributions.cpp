// Distributions of the sampler: exact small ones, and random chains against the reference.
#include "sampler_reference.hpp"

#include "runtime/runner/sampler_rng.hpp"

using namespace sampler_test;

namespace {

// 100,000 samples over positions; the statistic has the degrees of freedom of the support - 1.
double chi_square(const std::vector<float> &logits, Row row, const std::vector<double> &expected,
                  int *impossible) {
    Sampler sampler(stream(2), int64_t(logits.size()));
    std::vector<double> counts(logits.size());
    const int n_calls = 100, n_rows = 1000;
    for (int call = 0; call < n_calls; ++call) {
        std::vector<Row> rows(n_rows, row);
        for (int r = 0; r < n_rows; ++r) {
            rows[size_t(r)].position = call * n_rows + r;
        }
        for (const int32_t id : sample(sampler, logits, rows)) {
            counts[size_t(id)] += 1;
        }
    }
    double statistic = 0;
    for (size_t i = 0; i < counts.size(); ++i) {
        const double e = expected[i] * n_calls * n_rows;
        if (e > 0) {
            statistic += (counts[i] - e) * (counts[i] - e) / e;
        } else {
            *impossible += int(counts[i]);
        }
    }
    return statistic;
}

} // namespace

// Bounds: chi-square exceeds df + 5 sqrt(2 df) + 10 with a chance below 1e-5; the samples are
// fixed.
TEST(samples_follow_small_distributions) {
    const std::vector<float> logits{0.3f, -1.2f, 2.0f, 0.0f, 1.1f, -kInf, 0.9f, kNaN};
    std::vector<Row> rows(7);
    rows[1].temperature = 0.6f;
    rows[2].top_k = 3;
    rows[3].top_p = 0.8f;
    rows[4].min_p = 0.2f;
    rows[4].temperature = 1.7f;
    rows[5].typical_p = 0.6f;
    rows[6].top_n_sigma = 1.1f;
    for (Row &row : rows) {
        row.seed = 0x123456789abcdefull;
        const Reference reference = reference_of(logits.data(), 8, row, {}, {}, {});
        const std::vector<double> p = reference.probabilities();
        const double freedom =
            double(std::count_if(p.begin(), p.end(), [](double v) { return v > 0; })) - 1;
        int impossible = 0;
        const double statistic = chi_square(logits, row, p, &impossible);
        CHECK_EQ(impossible, 0);
        if (!(statistic < freedom + 5 * std::sqrt(2 * freedom) + 10)) {
            CHECK_EQ(statistic, freedom);
        }
    }
}

TEST(chain_without_truncation_samples_every_token) {
    const std::vector<float> flat(3000, 0.25f);
    int impossible = 0;
    const double statistic =
        chi_square(flat, Row(), std::vector<double>(3000, 1.0 / 3000), &impossible);
    const double freedom = 2999;
    CHECK(statistic < freedom + 5 * std::sqrt(2 * freedom) + 10);
    CHECK(statistic > freedom - 5 * std::sqrt(2 * freedom) - 10);
}

TEST(random_chains_match_the_reference) {
    std::mt19937 random(11);
    int doubtful_samples = 0, samples = 0;
    for (int round = 0; round < 400; ++round) {
        const size_t vocab = std::vector<size_t>{1, 5, 33, 700, 3001}[random() % 5];
        std::vector<float> logits = random_logits(random, vocab, round % 3 == 0 ? 0.2f : 3.0f);
        for (float &value : logits) { // ties
            value = random() % 4 == 0 ? std::round(value) : value;
        }
        const auto pick = [&](std::vector<float> values) {
            return values[random() % values.size()];
        };
        const auto token = [&] { return int64_t(random() % vocab); };
        std::vector<uint32_t> masks(2 * ((vocab + 31) / 32));
        for (uint32_t &word : masks) {
            word = random() % 3 == 0 ? 0 : uint32_t(random());
        }
        Row row;
        row.temperature = pick({0, 0.3f, 1, 1.9f});
        row.top_k = int32_t(pick({0, 0, 1, 3, 40, 2000}));
        row.top_p = pick({1, 1, 0.05f, 0.5f, 0.95f, 0.9999f});
        row.min_p = pick({0, 0, 0.01f, 0.3f});
        row.typical_p = pick({1, 1, 0.02f, 0.3f, 0.95f});
        row.top_n_sigma = pick({0, 0, 0.7f, 1.3f, 2.9f});
        row.repetition = pick({1, 1.3f, 0.7f});
        row.presence = pick({0, 0.4f, -0.2f});
        row.frequency = pick({0, 0.3f});
        row.dynatemp_range = pick({0, 0, 0.25f, 1.5f});
        row.dynatemp_exponent = pick({1, 0.5f, 2});
        std::shuffle(row.chain.begin(), row.chain.end(), random);
        row.chain.resize(random() % (row.chain.size() + 1));
        row.mask = vocab > 40 && random() % 3 == 0 ? int32_t(random() % 2) : -1;
        for (size_t n = random() % 4; n > 0; --n) {
            row.bias.push_back({int32_t(token()), pick({2.5f, -1.0f, 0.125f})});
        }
        if (vocab > 1 && random() % 4 == 0) {
            row.bias.push_back({int32_t(token()), -kInf});
        }
        std::vector<int64_t> prompt(random() % 20), sampled(random() % 20);
        std::generate(prompt.begin(), prompt.end(), token);
        std::generate(sampled.begin(), sampled.end(), token);

        const Reference reference =
            reference_of(logits.data(), int64_t(vocab), row, prompt, sampled, masks);
        if (reference.order().empty()) {
            continue;
        }
        Sampler sampler(stream(2), int64_t(vocab));
        sampler.reset(3, prompt.data(), int32_t(prompt.size()));
        sampler.accept(3, sampled.data(), int32_t(sampled.size()));
        row.seq = 3;
        row.seed = random();
        std::vector<Row> rows(20, row);
        for (size_t r = 0; r < rows.size(); ++r) {
            rows[r].position = int64_t(r);
            rows[r].choice = int32_t(r % 3);
        }
        const std::vector<int32_t> ids = sample(sampler, logits, rows, masks);
        for (size_t r = 0; r < rows.size(); ++r) {
            bool doubtful = false;
            const double u = uniform(row.seed, rows[r].choice, rows[r].position);
            const int32_t expected = reference.pick(u, &doubtful);
            ++samples;
            doubtful_samples += doubtful;
            if (!doubtful) {
                CHECK_EQ(ids[r], expected);
            }
        }
    }
    CHECK(samples > 5000);
    CHECK(doubtful_samples < samples / 20);
}

TEST(mirostat_matches_the_reference) {
    std::mt19937 random(13);
    int kept = 0, samples = 0;
    for (int round = 0; round < 2000; ++round) {
        const size_t vocab = std::vector<size_t>{1, 2, 33, 700}[random() % 4];
        const std::vector<float> logits = random_logits(random, vocab, round % 3 == 0 ? 1 : 3.0f);
        Row row;
        row.mirostat = 1 + int32_t(random() % 2);
        row.mirostat_mu = std::vector<float>{-1, 0.5f, 2, 5, 9}[random() % 5];
        row.temperature = random() % 2 == 0 ? 1 : 0.7f;
        row.seed = random();
        row.chain = {kTemperature, kMirostat};
        const Reference reference = reference_of(logits.data(), int64_t(vocab), row, {}, {}, {});
        bool doubtful = false;
        const int32_t expected = reference.pick(uniform(row.seed, 0, 0), &doubtful);
        kept += reference.order().size() < vocab;
        samples += !doubtful;
        if (!doubtful) {
            CHECK_EQ(sample_one(logits, row), expected);
        }
    }
    CHECK(samples > 1500);
    CHECK(kept > 500);
}

TEST(xtc_matches_the_reference) {
    std::mt19937 random(12);
    int excluded = 0, samples = 0;
    for (int round = 0; round < 1500; ++round) {
        const size_t vocab = std::vector<size_t>{1, 2, 5, 33, 700}[random() % 5];
        std::vector<float> logits = random_logits(random, vocab, round % 3 == 0 ? 0.2f : 3.0f);
        for (float &value : logits) { // ties
            value = random() % 4 == 0 ? std::round(value) : value;
        }
        const auto pick = [&](std::vector<float> values) {
            return values[random() % values.size()];
        };
        Row row;
        row.xtc_probability = pick({0, 0.5f, 1});
        row.xtc_threshold = pick({0, 0.011f, 0.1f, 0.3f, 0.5f, 0.6f});
        row.temperature = pick({0, 0.7f, 1});
        row.top_k = int32_t(pick({0, 10}));
        row.seed = random();
        row.position = int64_t(random() % 1000);
        row.chain = {kTopK, kXtc, kTemperature};
        if (random() % 2 == 0) {
            std::swap(row.chain[1], row.chain[2]);
        }
        const Reference reference = reference_of(logits.data(), int64_t(vocab), row, {}, {}, {});
        Row without = row;
        without.xtc_probability = 0;
        const Reference plain = reference_of(logits.data(), int64_t(vocab), without, {}, {}, {});
        bool doubtful = false;
        const int32_t expected = reference.pick(uniform(row.seed, 0, row.position), &doubtful);
        excluded += reference.order().size() != plain.order().size();
        if (!doubtful) {
            ++samples;
            CHECK_EQ(sample_one(logits, row), expected);
        }
    }
    CHECK(samples > 1000 && excluded > 100 && excluded < 1200);
}
