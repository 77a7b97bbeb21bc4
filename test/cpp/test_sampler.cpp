// The sampler against a twin in double precision, exact small distributions, and bad input.
#include "check.hpp"
#include "device/runtime.hpp"
#include "runtime/runner/sampler.hpp"
#include "runtime/runner/sampler_rng.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <random>

using namespace llaisys;
using namespace llaisys::runtime;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr uint8_t kPenalties = LLAISYS_SAMPLER_PENALTIES,
                  kTemperature = LLAISYS_SAMPLER_TEMPERATURE, kTopK = LLAISYS_SAMPLER_TOP_K,
                  kTopP = LLAISYS_SAMPLER_TOP_P, kMinP = LLAISYS_SAMPLER_MIN_P;

const device::Stream &stream(int n_threads = 1) {
    static std::map<int, std::unique_ptr<device::Stream>> streams;
    auto &entry = streams[n_threads];
    if (!entry) {
        entry = std::make_unique<device::Stream>(LLAISYS_DEVICE_CPU, 0, n_threads);
    }
    return *entry;
}

// One row's parameters, before they are laid out by column.
struct Row {
    float temperature = 1, top_p = 1, min_p = 0, repetition = 1, presence = 0, frequency = 0;
    int32_t top_k = 0, choice = 0, output = 0, n_logprobs = -1, mask = -1;
    uint64_t seed = 0;
    int64_t position = 0, seq = 0;
    std::vector<uint8_t> chain{kPenalties, kTemperature, kTopK, kTopP, kMinP};
    std::vector<std::pair<int32_t, float>> bias;
};

// Columns of rows; owns what the metadata points to.
struct Columns {
    std::vector<int32_t> outputs, top_k, choices, chain_offsets{0}, bias_offsets{0}, bias_ids,
        n_logprobs, mask_rows;
    std::vector<int64_t> seqs, positions;
    std::vector<float> temperature, top_p, min_p, repetition, presence, frequency, bias_values;
    std::vector<uint64_t> seeds;
    std::vector<uint8_t> chain;
    std::vector<uint32_t> masks;

    explicit Columns(const std::vector<Row> &rows, std::vector<uint32_t> mask_words = {})
        : masks(std::move(mask_words)) {
        for (const Row &row : rows) {
            outputs.push_back(row.output);
            top_k.push_back(row.top_k);
            choices.push_back(row.choice);
            n_logprobs.push_back(row.n_logprobs);
            mask_rows.push_back(row.mask);
            seqs.push_back(row.seq);
            positions.push_back(row.position);
            temperature.push_back(row.temperature);
            top_p.push_back(row.top_p);
            min_p.push_back(row.min_p);
            repetition.push_back(row.repetition);
            presence.push_back(row.presence);
            frequency.push_back(row.frequency);
            seeds.push_back(row.seed);
            chain.insert(chain.end(), row.chain.begin(), row.chain.end());
            chain_offsets.push_back(int32_t(chain.size()));
            for (const auto &entry : row.bias) {
                bias_ids.push_back(entry.first);
                bias_values.push_back(entry.second);
            }
            bias_offsets.push_back(int32_t(bias_ids.size()));
        }
    }
    LlaisysSamplingMetadata view(int64_t vocab = 1) const {
        LlaisysSamplingMetadata s = {};
        s.struct_size = sizeof s;
        s.n_rows = int32_t(outputs.size());
        s.rows = outputs.data();
        s.seq_ids = seqs.data();
        s.temperature = temperature.data();
        s.top_p = top_p.data();
        s.min_p = min_p.data();
        s.repetition_penalty = repetition.data();
        s.presence_penalty = presence.data();
        s.frequency_penalty = frequency.data();
        s.top_k = top_k.data();
        s.seeds = seeds.data();
        s.positions = positions.data();
        s.choices = choices.data();
        s.chain_offsets = chain_offsets.data();
        s.chain = chain.data();
        s.bias_offsets = bias_offsets.data();
        s.bias_ids = bias_ids.data();
        s.bias_values = bias_values.data();
        s.n_logprobs = n_logprobs.data();
        s.mask_rows = mask_rows.data();
        s.masks = masks.data();
        s.n_masks = int32_t(masks.size() / size_t((vocab + 31) / 32));
        return s;
    }
};

std::vector<int32_t> draw(Sampler &sampler, const std::vector<float> &logits,
                          const std::vector<Row> &rows, const std::vector<uint32_t> &masks = {}) {
    const Columns columns(rows, masks);
    std::vector<int32_t> ids(rows.size(), -1);
    sampler.sample(logits.data(), int32_t(int64_t(logits.size()) / sampler.vocab()),
                   columns.view(sampler.vocab()), ids.data());
    return ids;
}

int32_t draw_one(const std::vector<float> &logits, const Row &row) {
    Sampler sampler(stream(), int64_t(logits.size()));
    return draw(sampler, logits, {row})[0];
}

// -- The twin: documented maths, everything sorted, everything double -----------------------------

struct Twin {
    std::vector<double> x; // -inf: cut off
    std::vector<int32_t> order() const {
        std::vector<int32_t> ids;
        for (size_t i = 0; i < x.size(); ++i) {
            if (x[i] > -std::numeric_limits<double>::infinity()) {
                ids.push_back(int32_t(i));
            }
        }
        std::stable_sort(ids.begin(), ids.end(),
                         [&](int32_t a, int32_t b) { return x[size_t(a)] > x[size_t(b)]; });
        return ids;
    }
    std::vector<double> probabilities() const {
        const double max = *std::max_element(x.begin(), x.end());
        std::vector<double> p;
        double sum = 0;
        for (const double value : x) {
            p.push_back(std::exp(value - max));
            sum += p.back();
        }
        for (double &value : p) {
            value /= sum;
        }
        return p;
    }
    void keep(const std::vector<int32_t> &ids) {
        std::vector<double> kept(x.size(), -std::numeric_limits<double>::infinity());
        for (const int32_t id : ids) {
            kept[size_t(id)] = x[size_t(id)];
        }
        x = kept;
    }
    void apply(uint8_t kind, const Row &row, const std::vector<int64_t> &prompt,
               const std::vector<int64_t> &drawn) {
        std::vector<int32_t> ids = order();
        const std::vector<double> p = probabilities();
        if (kind == kPenalties) {
            for (size_t i = 0; i < x.size(); ++i) {
                const auto n = std::count(drawn.begin(), drawn.end(), int64_t(i));
                if (n > 0 || std::count(prompt.begin(), prompt.end(), int64_t(i)) > 0) {
                    x[i] = x[i] > 0 ? x[i] / double(row.repetition) : x[i] * double(row.repetition);
                }
                x[i] -= double(row.frequency) * double(n) + (n > 0 ? double(row.presence) : 0);
            }
        } else if (kind == kTemperature && row.temperature == 0) {
            keep({ids[0]});
        } else if (kind == kTemperature) {
            for (double &value : x) {
                value /= double(row.temperature);
            }
        } else if (kind == kTopK && row.top_k > 0 && size_t(row.top_k) < ids.size()) {
            ids.resize(size_t(row.top_k));
            keep(ids);
        } else if (kind == kTopP && row.top_p < 1) {
            double sum = 0;
            size_t n = 0;
            while (n < ids.size() && (n == 0 || sum < double(row.top_p))) {
                sum += p[size_t(ids[n++])];
            }
            ids.resize(n);
            keep(ids);
        } else if (kind == kMinP) {
            std::vector<int32_t> kept;
            for (const int32_t id : ids) {
                if (p[size_t(id)] >= double(row.min_p) * p[size_t(ids[0])]) {
                    kept.push_back(id);
                }
            }
            keep(kept);
        }
    }
    // The token at u, and whether u is too close to an edge to tell.
    int32_t pick(double u, bool *doubtful) const {
        const std::vector<double> p = probabilities();
        double sum = 0;
        int32_t found = -1;
        *doubtful = false;
        for (size_t i = 0; i < p.size(); ++i) {
            sum += p[i];
            *doubtful = *doubtful || (p[i] > 0 && std::fabs(sum - u) < 1e-6);
            if (found < 0 && sum > u) {
                found = int32_t(i);
            }
        }
        return found;
    }
};

Twin twin_of(const float *logits, int64_t vocab, const Row &row, const std::vector<int64_t> &prompt,
             const std::vector<int64_t> &drawn, const std::vector<uint32_t> &masks) {
    Twin twin;
    for (int64_t i = 0; i < vocab; ++i) {
        const bool allowed =
            row.mask < 0 ||
            (masks[size_t(row.mask * ((vocab + 31) / 32) + i / 32)] >> (i % 32) & 1u) != 0;
        twin.x.push_back(allowed && !std::isnan(logits[i])
                             ? double(logits[i])
                             : -std::numeric_limits<double>::infinity());
    }
    for (const auto &entry : row.bias) {
        twin.x[size_t(entry.first)] += double(entry.second);
    }
    for (const uint8_t kind : row.chain) {
        twin.apply(kind, row, prompt, drawn);
    }
    return twin;
}

std::vector<float> random_logits(std::mt19937 &random, size_t n, float spread) {
    std::normal_distribution<float> normal(0, spread);
    std::vector<float> logits(n);
    std::generate(logits.begin(), logits.end(), [&] { return normal(random); });
    return logits;
}

// 100,000 draws over positions; the statistic has the degrees of freedom of the support - 1.
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
        for (const int32_t id : draw(sampler, logits, rows)) {
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

// -- Pieces --------------------------------------------------------------------------------------

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

TEST(uniform_depends_on_seed_choice_and_position_alone) {
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

TEST(exp_is_within_two_units_of_the_last_place) {
    double worst = 0;
    for (float x = -87.0f; x <= 0; x += 0.00037f) {
        const double exact = std::exp(double(x));
        worst = std::max(worst, std::fabs(double(exp_of(x)) - exact) / exact);
    }
    CHECK(worst < 2.4e-7);
    CHECK_EQ(exp_of(0.0f), 1.0f);
    CHECK_EQ(exp_of(-88.0f), 0.0f);
    CHECK_EQ(exp_of(-kInf), 0.0f);
    CHECK_EQ(exp_of(kNaN), 0.0f);
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

TEST(walk_down_stops_where_a_sorted_walk_does) {
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
            weigh(x.data(), int64_t(n), max, 0.7f, weights.data(), block_sums.data());
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
                walk_down(x.data(), weights.data(), int64_t(n), max, 0.7f, part * sum, &scratch).id,
                all[last].id);
        }
    }
    const float infinite[] = {1, kInf, kInf}, two[] = {0, 1, 1};
    CHECK_EQ(walk_down(infinite, two, 3, kInf, 1, 1.5, &scratch).id, 2);
    CHECK_EQ(walk_down(infinite, two, 3, kInf, 1, 9.0, &scratch).id, 2); // more than there is
}

TEST(argmax_takes_the_lowest_id_and_passes_nan_over) {
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

// -- Distributions -------------------------------------------------------------------------------

// Bounds: chi-square exceeds df + 5 sqrt(2 df) + 10 with a chance below 1e-5; the draws are fixed.
TEST(draws_follow_small_distributions) {
    const std::vector<float> logits{0.3f, -1.2f, 2.0f, 0.0f, 1.1f, -kInf, 0.9f, kNaN};
    std::vector<Row> rows(5);
    rows[1].temperature = 0.6f;
    rows[2].top_k = 3;
    rows[3].top_p = 0.8f;
    rows[4].min_p = 0.2f;
    rows[4].temperature = 1.7f;
    for (Row &row : rows) {
        row.seed = 0x123456789abcdefull;
        const Twin twin = twin_of(logits.data(), 8, row, {}, {}, {});
        const std::vector<double> p = twin.probabilities();
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

TEST(nothing_truncates_a_chain_without_truncation) {
    const std::vector<float> flat(3000, 0.25f);
    int impossible = 0;
    const double statistic =
        chi_square(flat, Row(), std::vector<double>(3000, 1.0 / 3000), &impossible);
    const double freedom = 2999;
    CHECK(statistic < freedom + 5 * std::sqrt(2 * freedom) + 10);
    CHECK(statistic > freedom - 5 * std::sqrt(2 * freedom) - 10);
}

TEST(random_chains_draw_what_the_twin_draws) {
    std::mt19937 random(11);
    int doubtful_draws = 0, draws = 0;
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
        row.repetition = pick({1, 1.3f, 0.7f});
        row.presence = pick({0, 0.4f, -0.2f});
        row.frequency = pick({0, 0.3f});
        std::shuffle(row.chain.begin(), row.chain.end(), random);
        row.chain.resize(random() % 6);
        row.mask = vocab > 40 && random() % 3 == 0 ? int32_t(random() % 2) : -1;
        for (size_t n = random() % 4; n > 0; --n) {
            row.bias.push_back({int32_t(token()), pick({2.5f, -1.0f, 0.125f})});
        }
        if (vocab > 1 && random() % 4 == 0) {
            row.bias.push_back({int32_t(token()), -kInf});
        }
        std::vector<int64_t> prompt(random() % 20), drawn(random() % 20);
        std::generate(prompt.begin(), prompt.end(), token);
        std::generate(drawn.begin(), drawn.end(), token);

        const Twin twin = twin_of(logits.data(), int64_t(vocab), row, prompt, drawn, masks);
        if (twin.order().empty()) {
            continue;
        }
        Sampler sampler(stream(2), int64_t(vocab));
        sampler.reset(3, prompt.data(), int32_t(prompt.size()));
        sampler.accept(3, drawn.data(), int32_t(drawn.size()));
        row.seq = 3;
        row.seed = random();
        std::vector<Row> rows(20, row);
        for (size_t r = 0; r < rows.size(); ++r) {
            rows[r].position = int64_t(r);
            rows[r].choice = int32_t(r % 3);
        }
        const std::vector<int32_t> ids = draw(sampler, logits, rows, masks);
        for (size_t r = 0; r < rows.size(); ++r) {
            bool doubtful = false;
            const double u = uniform(row.seed, rows[r].choice, rows[r].position);
            const int32_t expected = twin.pick(u, &doubtful);
            ++draws;
            doubtful_draws += doubtful;
            if (!doubtful) {
                CHECK_EQ(ids[r], expected);
            }
        }
    }
    CHECK(draws > 5000);
    CHECK(doubtful_draws < draws / 20);
}

// -- Links ---------------------------------------------------------------------------------------

TEST(temperature_zero_takes_the_most_likely_and_lowest_id) {
    Row row;
    row.temperature = 0;
    CHECK_EQ(draw_one({1, 5, 5, 2}, row), 1);
    row.top_k = 3;
    row.top_p = 0.1f;
    row.min_p = 1;
    CHECK_EQ(draw_one({1, 5, 5, 2}, row), 1);
    row.bias = {{1, -kInf}, {3, 3.5f}};
    CHECK_EQ(draw_one({1, 5, 5, 2}, row), 3);
    row.chain = {};
    row.bias.clear();
    row.seed = 1; // without its link the temperature does not count
    std::vector<int> seen(4);
    Sampler sampler(stream(), 4);
    for (int64_t i = 0; i < 200; ++i) {
        row.position = i;
        seen[size_t(draw(sampler, {1, 1, 1, 1}, {row})[0])] += 1;
    }
    CHECK(*std::min_element(seen.begin(), seen.end()) > 10);
}

TEST(ties_at_the_edge_keep_the_lowest_ids) {
    const std::vector<float> logits{1, 3, 2, 2, 2, 0};
    const auto support = [&](const Row &base) {
        Sampler sampler(stream(), 6);
        std::vector<Row> rows(300, base);
        for (size_t r = 0; r < rows.size(); ++r) {
            rows[r].position = int64_t(r);
        }
        std::string seen(6, '.');
        for (const int32_t id : draw(sampler, logits, rows)) {
            seen[size_t(id)] = 'x';
        }
        return seen;
    };
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
    CHECK_EQ(draw(sampler, logits, {row})[0], 0);
    row.chain = {kPenalties, kTopK};
    CHECK_EQ(draw(sampler, logits, {row})[0], 1);
    row.temperature = 0; // also where a temperature of 0 ends the chain
    row.chain = {kTopK, kPenalties, kTemperature};
    CHECK_EQ(draw(sampler, logits, {row})[0], 0);
    row.chain = {kTemperature, kPenalties};
    CHECK_EQ(draw(sampler, logits, {row})[0], 0);
    row.chain = {kPenalties, kTemperature, kTopK};
    CHECK_EQ(draw(sampler, logits, {row})[0], 1);
}

TEST(penalties_count_prompt_and_drawn_tokens_as_documented) {
    Sampler sampler(stream(), 4);
    const std::vector<int64_t> prompt{0, 0, 1}, drawn{1, 2, 2};
    Row row;
    row.seq = 9;
    row.temperature = 0;
    row.n_logprobs = 0;
    const auto best = [&](std::vector<float> logits) { return draw(sampler, logits, {row})[0]; };
    sampler.reset(9, prompt.data(), 3);
    sampler.accept(9, drawn.data(), 3);
    row.presence = 1; // 0 was in the prompt only
    CHECK_EQ(best({1, 1.9f, 1.9f, -9}), 0);
    CHECK_EQ(best({1, 2.1f, 1.9f, -9}), 1);
    row.presence = 0;
    row.frequency = 1; // 1 was drawn once, 2 twice
    CHECK_EQ(best({1, 1.9f, 2.9f, -9}), 0);
    CHECK_EQ(best({1, 1.5f, 3.1f, -9}), 2);
    row.frequency = 0;
    row.repetition = 2; // all of the history, the sign decides
    CHECK_EQ(best({3, 3, 3, 1.6f}), 3);
    CHECK_EQ(best({-1, -1.2f, -1.3f, -1.9f}), 3);
    CHECK_EQ(best({-1, -1.2f, -1.3f, -2.1f}), 0);
    sampler.reset(9, nullptr, 0); // empty again
    CHECK_EQ(best({3, 3, 3, 1.6f}), 0);
    sampler.accept(9, drawn.data(), 1);
    CHECK_EQ(best({1, 3, 1.2f, 1.6f}), 3);
    sampler.forget(9);
    CHECK_EQ(best({1, 3, 1.2f, 1.6f}), 1);
    sampler.forget(77); // never known
}

TEST(sampling_does_not_change_the_history) {
    Sampler sampler(stream(), 3);
    const int64_t token = 1;
    sampler.accept(0, &token, 1);
    Row row;
    row.presence = 0.5f;
    row.seed = 4;
    const std::vector<int32_t> first = draw(sampler, {1, 1, 1}, std::vector<Row>(50, row));
    CHECK(first == draw(sampler, {1, 1, 1}, std::vector<Row>(50, row)));
}

TEST(masks_and_bans_leave_only_what_is_allowed) {
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
        const std::vector<int32_t> ids = draw(sampler, logits, rows, masks);
        CHECK_EQ(ids[1], int32_t(vocab - 1));
        CHECK_EQ(ids[2], ids[0]);
        rows[1].bias = {{int32_t(vocab - 1), -kInf}};
        CHECK_THROWS(draw(sampler, logits, rows, masks), "row 1", "no token left");
        rows[1].bias = {{0, 100.0f}}; // a bias does not bring back what the mask took
        CHECK_EQ(draw(sampler, logits, rows, masks)[1], int32_t(vocab - 1));
    }
}

TEST(a_row_without_a_token_is_an_error_whatever_the_chain) {
    for (const uint8_t kind : {kPenalties, kTemperature, kTopK, kTopP, kMinP}) {
        for (const float temperature : {0.0f, 1.0f}) {
            Row row;
            row.chain = {kind};
            row.temperature = temperature;
            row.top_k = 1;
            row.top_p = 0.5f;
            row.min_p = 0.5f;
            CHECK_THROWS(draw_one({-kInf, kNaN, -kInf}, row), "row 0", "no token left");
            CHECK_THROWS(draw_one({kNaN, kNaN}, row), "internal error", "output row 0", "NaN");
            CHECK_THROWS(draw_one({kNaN}, row), "NaN");
            CHECK_EQ(draw_one({-kInf, kNaN, -200.0f}, row), 2);
            CHECK_EQ(draw_one({1, kInf, 2}, row), 1);
        }
    }
}

TEST(extreme_logits_and_temperatures_stay_finite) {
    Row row;
    row.temperature = std::numeric_limits<float>::denorm_min();
    CHECK_EQ(draw_one({1, 3, 2.9999f}, row), 1);
    row.temperature = std::numeric_limits<float>::max();
    CHECK(draw_one({-3e38f, 3e38f, 0}, row) >= 0);
    row.temperature = 1;
    CHECK_EQ(draw_one({-3e38f, 3e38f, 0}, row), 1);
    CHECK_EQ(draw_one({7}, row), 0);
}

// -- Independence --------------------------------------------------------------------------------

TEST(a_row_draws_the_same_alone_in_any_batch_and_with_any_threads) {
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
        alone.push_back(draw(single, logits, {row})[0]);
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
            const std::vector<int32_t> ids = draw(sampler, logits, batch);
            for (size_t i = 0; i < order.size(); ++i) {
                CHECK_EQ(ids[i], alone[order[i]]);
                const LlaisysLogprobs l = sampler.logprobs(int32_t(i));
                CHECK(std::vector<float>(l.logprobs, l.logprobs + l.n) == values[order[i]]);
            }
        }
    }
}

TEST(null_columns_mean_their_neutral_values) {
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
    CHECK(draw(sampler, logits, rows) == std::vector<int32_t>(ids, ids + 3));
    CHECK_EQ(sampler.logprobs(2).n, 0);
    plain.n_rows = 0;
    sampler.sample(nullptr, 0, plain, nullptr); // nothing to do
    CHECK_THROWS(sampler.logprobs(0), "[0, 0)", "got 0");
}

// -- Logprobs ------------------------------------------------------------------------------------

TEST(logprobs_are_those_of_the_raw_row) {
    const std::vector<float> logits{1, 3, 2, 3, kNaN, -kInf, 0.5f};
    double sum = 0;
    for (const float x : logits) {
        sum += x > -kInf ? std::exp(double(x)) : 0;
    }
    Sampler sampler(stream(), 7);
    Row row; // bias, mask and chain do not show
    row.bias = {{1, -kInf}, {3, -kInf}, {0, 50.0f}};
    row.temperature = 0.1f;
    row.top_k = 1;
    row.n_logprobs = 3;
    CHECK_EQ(draw(sampler, logits, {row})[0], 0);
    LlaisysLogprobs l = sampler.logprobs(0);
    CHECK_EQ(l.n, 4);
    CHECK_EQ(l.sampled_rank, 4);
    const int32_t expected[] = {0, 1, 3, 2};
    for (int i = 0; i < 4; ++i) {
        CHECK_EQ(l.ids[i], expected[i]);
        CHECK(std::fabs(double(l.logprobs[i]) -
                        (double(logits[size_t(expected[i])]) - std::log(sum))) < 1e-6);
    }
    row.n_logprobs = 7; // two of seven cannot be drawn at all
    draw(sampler, logits, {row});
    CHECK_EQ(sampler.logprobs(0).n, 6);
    row.n_logprobs = 0;
    row.bias = {{1, -kInf}};
    draw(sampler, logits, {row});
    l = sampler.logprobs(0);
    CHECK_EQ(l.n, 1);
    CHECK_EQ(l.ids[0], 3);
    CHECK_EQ(l.sampled_rank, 2); // the equal one with the lower id comes first
    CHECK_THROWS(sampler.logprobs(1), "[0, 1)", "got 1");
    CHECK_THROWS(sampler.logprobs(-1), "got -1");
    sampler.clear_logprobs();
    CHECK_THROWS(sampler.logprobs(0), "[0, 0)");
}

TEST(logprobs_of_infinite_logits_are_numbers) {
    Sampler sampler(stream(), 3);
    Row row;
    row.n_logprobs = 3;
    draw(sampler, {kInf, 1, kInf}, {row});
    const LlaisysLogprobs l = sampler.logprobs(0);
    CHECK_EQ(l.n, 4);
    CHECK(std::fabs(double(l.logprobs[0]) + std::log(2.0)) < 1e-6);
    CHECK_EQ(l.logprobs[3], -kInf);
}

// -- Bad input -----------------------------------------------------------------------------------

namespace {

template <typename Change> void refused(std::initializer_list<const char *> parts, Change change) {
    Sampler sampler(stream(), 10);
    const std::vector<float> logits(20, 1.0f);
    Row row;
    row.bias = {{1, 1.0f}};
    row.n_logprobs = 1;
    row.mask = 0;
    Columns columns({row, row}, {~0u});
    LlaisysSamplingMetadata s = columns.view(10);
    int32_t ids[2] = {-7, -7};
    sampler.sample(logits.data(), 2, s, ids);
    const int32_t before = ids[1];
    change(columns, s);
    check::throws(__FILE__, __LINE__, "sample", parts,
                  [&] { sampler.sample(logits.data(), 2, s, ids); });
    CHECK_EQ(ids[1], before);
    CHECK_EQ(sampler.logprobs(1).n, 2); // of the call before
}

} // namespace

TEST(bad_parameters_are_named_with_row_value_and_limit) {
    using C = Columns;
    using S = LlaisysSamplingMetadata;
    refused({"n_rows", "got -1"}, [](C &, S &s) { s.n_rows = -1; });
    refused({"reserved", "got 3"}, [](C &, S &s) { s.reserved = 3; });
    refused({"rows[1]", "[0, 2)", "got 2"}, [](C &c, S &) { c.outputs[1] = 2; });
    refused({"rows[0]", "got -1"}, [](C &c, S &) { c.outputs[0] = -1; });
    refused({"n_rows", "2", "got 3"}, [](C &, S &s) {
        s.rows = nullptr;
        s.n_rows = 3;
    });
    refused({"seq_ids[1]", "got -5"}, [](C &c, S &) { c.seqs[1] = -5; });
    refused({"temperature[1]", "got -0.5"}, [](C &c, S &) { c.temperature[1] = -0.5f; });
    refused({"temperature[0]", "got nan"}, [](C &c, S &) { c.temperature[0] = kNaN; });
    refused({"temperature[0]", "got inf"}, [](C &c, S &) { c.temperature[0] = kInf; });
    refused({"top_p[1]", "(0, 1]", "got 0"}, [](C &c, S &) { c.top_p[1] = 0; });
    refused({"top_p[1]", "got 1.5"}, [](C &c, S &) { c.top_p[1] = 1.5f; });
    refused({"top_p[1]", "got nan"}, [](C &c, S &) { c.top_p[1] = kNaN; });
    refused({"min_p[0]", "[0, 1]", "got 2"}, [](C &c, S &) { c.min_p[0] = 2; });
    refused({"min_p[0]", "got nan"}, [](C &c, S &) { c.min_p[0] = kNaN; });
    refused({"repetition_penalty[0]", "got 0"}, [](C &c, S &) { c.repetition[0] = 0; });
    refused({"presence_penalty[1]", "got -inf"}, [](C &c, S &) { c.presence[1] = -kInf; });
    refused({"frequency_penalty[1]", "got nan"}, [](C &c, S &) { c.frequency[1] = kNaN; });
    refused({"top_k[1]", "got -1"}, [](C &c, S &) { c.top_k[1] = -1; });
    refused({"positions[1]", "got -1"}, [](C &c, S &) { c.positions[1] = -1; });
    refused({"choices[1]", "got -1"}, [](C &c, S &) { c.choices[1] = -1; });
    refused({"n_logprobs[1]", "[-1, 10]", "got 11"}, [](C &c, S &) { c.n_logprobs[1] = 11; });
    refused({"n_logprobs[1]", "got -2"}, [](C &c, S &) { c.n_logprobs[1] = -2; });
    refused({"chain_offsets[0]", "got 1"}, [](C &c, S &) { c.chain_offsets[0] = 1; });
    refused({"chain_offsets[2]", "5", "got 4"}, [](C &c, S &) { c.chain_offsets[2] = 4; });
    refused({"chain of row 1", "5", "got 2000000000"},
            [](C &c, S &) { c.chain_offsets[2] = 2000000005; });
    refused({"chain is NULL"}, [](C &, S &s) { s.chain = nullptr; });
    refused({"chain[6]", "row 1", "[0, 5)", "got 5"}, [](C &c, S &) { c.chain[6] = 5; });
    refused({"chain[1]", "row 0", "repeats kind 0"}, [](C &c, S &) { c.chain[1] = 0; });
    refused({"bias_offsets[0]", "got -1"}, [](C &c, S &) { c.bias_offsets[0] = -1; });
    refused({"bias_offsets[2]", "got 0"}, [](C &c, S &) { c.bias_offsets[2] = 0; });
    refused({"bias_ids is NULL"}, [](C &, S &s) { s.bias_ids = nullptr; });
    refused({"bias_values is NULL"}, [](C &, S &s) { s.bias_values = nullptr; });
    refused({"bias_ids[1]", "row 1", "[0, 10)", "got 10"}, [](C &c, S &) { c.bias_ids[1] = 10; });
    refused({"bias_values[0]", "row 0", "got inf"}, [](C &c, S &) { c.bias_values[0] = kInf; });
    refused({"bias_values[1]", "got nan"}, [](C &c, S &) { c.bias_values[1] = kNaN; });
    refused({"n_masks", "got -1"}, [](C &, S &s) { s.n_masks = -1; });
    refused({"mask_rows[1]", "[-1, 1)", "got 1"}, [](C &c, S &) { c.mask_rows[1] = 1; });
    refused({"mask_rows[0]", "got -2"}, [](C &c, S &) { c.mask_rows[0] = -2; });
    refused({"masks is NULL", "mask_rows[0]"}, [](C &, S &s) { s.masks = nullptr; });
}

TEST(bad_arguments_are_refused) {
    CHECK_THROWS(Sampler(stream(), 0), "vocabulary", "got 0");
    Sampler sampler(stream(), 4);
    LlaisysSamplingMetadata s = {};
    s.n_rows = 1;
    int32_t id = 0;
    const float logits[4] = {};
    CHECK_THROWS(sampler.sample(nullptr, 1, s, &id), "logits is NULL");
    CHECK_THROWS(sampler.sample(logits, 1, s, nullptr), "ids is NULL");
    const int64_t good[] = {1, 2}, bad[] = {1, 4};
    CHECK_THROWS(sampler.reset(-1, good, 2), "seq_id", "got -1");
    CHECK_THROWS(sampler.reset(0, bad, 2), "prompt[1]", "[0, 4)", "got 4");
    CHECK_THROWS(sampler.reset(0, nullptr, 2), "prompt is NULL");
    CHECK_THROWS(sampler.accept(0, good, -1), "got -1");
    CHECK_THROWS(sampler.accept(0, bad, 2), "tokens[1]", "got 4");
    CHECK_THROWS(sampler.forget(-1), "seq_id");
    // A refused accept has changed nothing: token 1 was not counted.
    const float row[] = {0, 3, 1, 0};
    const float zero = 0, heavy = 9;
    const int64_t seq = 0;
    s.seq_ids = &seq;
    s.temperature = &zero;
    s.presence_penalty = &heavy;
    sampler.sample(row, 1, s, &id);
    CHECK_EQ(id, 1);
}
