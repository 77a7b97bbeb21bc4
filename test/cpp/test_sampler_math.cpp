// Building blocks of the sampler: random numbers, exp and the selection of candidates.
#include "sampler_rows.hpp"

#include "runtime/runner/sampler_math.hpp"
#include "runtime/runner/sampler_rng.hpp"

#include <cmath>

using namespace sampler_test;

TEST(philox_gives_the_published_words) {
    const auto check_words = [](std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key,
                                std::array<uint32_t, 4> expected) {
        CHECK(philox(counter, key) == expected);
    };
    const uint32_t f = 0xffffffffu;
    check_words({0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
    check_words({f, f, f, f}, {f, f}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
    check_words({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0},
                {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST(uniform_depends_only_on_seed_choice_and_position) {
    CHECK_EQ(uniform(1, 2, 3), uniform(1, 2, 3));
    CHECK(uniform(1, 2, 3) != uniform(2, 2, 3));
    CHECK(uniform(1, 2, 3) != uniform(1, 3, 3));
    CHECK(uniform(1, 2, 3) != uniform(1, 2, 4));
    CHECK(uniform(1, 2, 3) != uniform(1 + (uint64_t(1) << 32), 2, 3));
    CHECK(uniform(1, 2, 3) != uniform(1, 2, 3 + (int64_t(1) << 32)));
    double sum = 0;
    for (int64_t i = 0; i < 100000; ++i) {
        const double u = uniform(7, 0, i);
        CHECK(u >= 0 && u < 1);
        sum += u;
    }
    CHECK(std::fabs(sum / 100000 - 0.5) < 0.005);
}

TEST(exp_is_within_two_ulps) {
    double worst = 0;
    for (float x = -87.0f; x <= 0; x += 0.00037f) {
        const double exact = std::exp(double(x));
        worst = std::max(worst, std::fabs(double(sampling::exp_of(x)) - exact) / exact);
    }
    CHECK(worst < 2.4e-7);
    CHECK_EQ(sampling::exp_of(0.0f), 1.0f);
    CHECK_EQ(sampling::exp_of(-88.0f), 0.0f);
    CHECK_EQ(sampling::exp_of(-kInf), 0.0f);
    CHECK_EQ(sampling::exp_of(kNaN), 0.0f);
}

TEST(select_best_agrees_with_sorting) {
    std::mt19937 random(3);
    std::vector<Candidate> best;
    for (const int64_t n : {1, 15, 16, 17, 100, 5000}) {
        for (const int64_t k : {1, 2, 7, 100, 1200, 4999, 5000, 9000}) {
            std::vector<float> x(static_cast<size_t>(n));
            for (float &value : x) { // many ties, some bans
                value = float(random() % 40);
                value = random() % 9 == 0 ? (random() % 2 == 0 ? kNaN : -kInf) : value;
            }
            std::vector<Candidate> all;
            for (int64_t i = 0; i < n; ++i) {
                if (x[size_t(i)] > -kInf) {
                    all.push_back({x[size_t(i)], int32_t(i)});
                }
            }
            std::sort(all.begin(), all.end(), is_better);
            all.resize(std::min(all.size(), size_t(k)));
            select_best(x.data(), nullptr, n, k, Order::best_first, &best);
            CHECK_EQ(best.size(), all.size());
            for (size_t i = 0; i < std::min(all.size(), best.size()); ++i) {
                CHECK_EQ(best[i].id, all[i].id);
            }
            select_best(x.data(), nullptr, n, k, Order::by_id, &best);
            CHECK(std::is_sorted(best.begin(), best.end(),
                                 [](auto &a, auto &b) { return a.id < b.id; }));
        }
    }
}

TEST(find_cutoff_agrees_with_sorting) {
    std::mt19937 random(6);
    std::vector<Candidate> scratch;
    for (int round = 0; round < 60; ++round) {
        const size_t n = 1 + random() % 4000;
        std::vector<float> x = random_logits(random, n, round % 2 == 0 ? 0.01f : 4.0f), weights(n);
        if (round % 3 == 0) { // ties
            std::transform(x.begin(), x.end(), x.begin(), [](float v) { return std::round(v); });
        }
        std::vector<double> block_sums(n / size_t(kWeightBlock) + 1);
        const float max = max_of(x.data(), int64_t(n));
        const double sum =
            softmax_weights(x.data(), int64_t(n), max, 0.7f, weights.data(), block_sums.data());
        std::vector<Candidate> all;
        for (size_t i = 0; i < n; ++i) {
            all.push_back({x[i], int32_t(i)});
        }
        std::sort(all.begin(), all.end(), is_better);
        for (const double part : {0.0, 0.123, 0.5, 0.9, 0.999}) {
            double passed = 0;
            size_t last = 0;
            while (last + 1 < n && passed + double(weights[size_t(all[last].id)]) < part * sum) {
                passed += double(weights[size_t(all[last++].id)]);
            }
            CHECK_EQ(
                find_cutoff(x.data(), weights.data(), int64_t(n), max, 0.7f, part * sum, &scratch)
                    .id,
                all[last].id);
        }
    }
    const float infinite[] = {1, kInf, kInf}, two[] = {0, 1, 1};
    CHECK_EQ(find_cutoff(infinite, two, 3, kInf, 1, 1.5, &scratch).id, 2);
    CHECK_EQ(find_cutoff(infinite, two, 3, kInf, 1, 9.0, &scratch).id, 2); // more than the sum
}

TEST(argmax_returns_the_lowest_id_and_skips_nan) {
    std::mt19937 random(5);
    for (const size_t n : {1u, 7u, 1023u, 1024u, 1025u, 5000u}) {
        std::vector<float> x = random_logits(random, n, 1);
        const size_t at = random() % n;
        x[at] = 50;
        x[n - 1] = 50;
        x[0] = n > 1 && at != 0 ? kNaN : x[0];
        CHECK_EQ(argmax_of(x.data(), int64_t(n)), int64_t(at));
    }
    const float banned[] = {-kInf, kNaN, -kInf};
    CHECK_EQ(argmax_of(banned, 3), -1);
    CHECK_EQ(argmax_of(banned, 0), -1);
    CHECK(!is_all_nan(banned, 3));
    CHECK(is_all_nan(banned + 1, 1));
}
