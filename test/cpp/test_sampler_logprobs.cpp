// Logprobs of the sampler.
#include "sampler_rows.hpp"

#include <cmath>

using namespace sampler_test;

TEST(logprobs_are_those_of_the_raw_row) {
    const std::vector<float> logits{1, 3, 2, 3, kNaN, -kInf, 0.5f};
    double sum = 0;
    for (const float x : logits) {
        sum += x > -kInf ? std::exp(double(x)) : 0;
    }
    Sampler sampler(stream(), 7);
    Row row; // bias, mask and chain do not affect logprobs
    row.bias = {{1, -kInf}, {3, -kInf}, {0, 50.0f}};
    row.temperature = 0.1f;
    row.top_k = 1;
    row.n_logprobs = 3;
    CHECK_EQ(sample(sampler, logits, {row})[0], 0);
    LlaisysLogprobs l = sampler.logprobs(0);
    CHECK_EQ(l.n, 4);
    CHECK_EQ(l.sampled_rank, 4);
    const int32_t expected[] = {0, 1, 3, 2};
    for (int i = 0; i < 4; ++i) {
        CHECK_EQ(l.ids[i], expected[i]);
        CHECK(std::fabs(double(l.logprobs[i]) -
                        (double(logits[size_t(expected[i])]) - std::log(sum))) < 1e-6);
    }
    row.n_logprobs = 7; // two of seven cannot be sampled at all
    sample(sampler, logits, {row});
    CHECK_EQ(sampler.logprobs(0).n, 6);
    row.n_logprobs = 0;
    row.bias = {{1, -kInf}};
    sample(sampler, logits, {row});
    l = sampler.logprobs(0);
    CHECK_EQ(l.n, 1);
    CHECK_EQ(l.ids[0], 3);
    CHECK_EQ(l.sampled_rank, 2); // on a tie the lower id ranks first
    CHECK_THROWS(sampler.logprobs(1), "[0, 1)", "got 1");
    CHECK_THROWS(sampler.logprobs(-1), "got -1");
    sampler.clear_logprobs();
    CHECK_THROWS(sampler.logprobs(0), "[0, 0)");
}

TEST(post_sampling_probs_are_those_after_the_chain) {
    const std::vector<float> logits{1, 3, 2, 3, kNaN, -kInf, 0.5f};
    Sampler sampler(stream(), 7);
    Row row;
    row.bias = {{1, -1.0f}, {6, -kInf}};
    row.temperature = 0.5f;
    row.top_k = 3;
    row.n_logprobs = 5;
    row.post_sampling_probs = 1;
    const int32_t id = sample(sampler, logits, {row})[0];
    const LlaisysLogprobs l = sampler.logprobs(0); // left: 3 at 3, 1 and 2 at 2
    CHECK_EQ(l.n, 4);
    const int32_t expected[] = {id, 3, 1, 2};
    for (int i = 0; i < 4; ++i) {
        CHECK_EQ(l.ids[i], expected[i]);
        const double weight = expected[i] == 3 ? 1 : std::exp(-2.0);
        CHECK(std::fabs(double(l.logprobs[i]) - std::log(weight / (1 + 2 * std::exp(-2.0)))) <
              1e-6);
    }
    CHECK_EQ(l.sampled_rank, id == 3 ? 1 : id == 1 ? 2 : 3);
    row.temperature = 0;
    CHECK_EQ(sample(sampler, logits, {row})[0], 3);
    CHECK_EQ(sampler.logprobs(0).n, 2);
    CHECK_EQ(sampler.logprobs(0).logprobs[1], 0.0f);
}

TEST(logprobs_of_infinite_logits_are_numbers) {
    Sampler sampler(stream(), 3);
    Row row;
    row.n_logprobs = 3;
    sample(sampler, {kInf, 1, kInf}, {row});
    const LlaisysLogprobs l = sampler.logprobs(0);
    CHECK_EQ(l.n, 4);
    CHECK(std::fabs(double(l.logprobs[0]) + std::log(2.0)) < 1e-6);
    CHECK_EQ(l.logprobs[3], -kInf);
}
