// The device sampler without memory: the call fails and later calls succeed.
#include "check.hpp"
#include "fake_device.hpp"
#include "runtime/runner/device_sampler.hpp"

#include <string>
#include <vector>

using namespace llaisys;
using namespace llaisys::runtime;

namespace {

constexpr int64_t kVocabulary = 500;
constexpr int kSmall = 2, kLarge = 3000;

// The argmax of row r is token r % kVocabulary.
Tensor rows_of(int n) {
    Tensor rows = Tensor::create({n, kVocabulary}, LLAISYS_DTYPE_F32, LLAISYS_DEVICE_CPU, 0);
    auto *values = rows.as<float>();
    for (int64_t i = 0; i < n * kVocabulary; ++i) {
        values[i] = i % kVocabulary == i / kVocabulary % kVocabulary ? 1.0f : 0.0f;
    }
    return rows;
}

void check_greedy(DeviceSampler *sample, const Tensor &logits) {
    const auto n = int32_t(logits.size(0));
    LlaisysSamplingMetadata sampling{};
    sampling.n_rows = n;
    std::vector<int32_t> ids(static_cast<size_t>(n));
    CHECK(sample->finish(sample->queue(logits), sampling, ids.data()));
    for (int32_t r = 0; r < n; ++r) {
        CHECK_EQ(ids[size_t(r)], int32_t(r % kVocabulary));
    }
}

// With a bias that makes token 7 the best of every row.
void check_adjusted(DeviceSampler *sample, const Tensor &logits) {
    const auto n = size_t(logits.size(0));
    SamplingPlan plan;
    plan.adjusts = true;
    plan.temperatures.assign(n, 1.0f);
    plan.uniforms.assign(n, 0.5);
    plan.mask_rows.assign(n, -1);
    plan.bias_offsets.push_back(0);
    plan.history_offsets.assign(n + 1, 0);
    for (size_t r = 0; r < n; ++r) {
        plan.rows.push_back(int32_t(r));
        plan.bias_ids.push_back(7);
        plan.bias_values.push_back(5.0f);
        plan.bias_offsets.push_back(int32_t(r) + 1);
        plan.penalties.insert(plan.penalties.end(), {1.0f, 0.0f, 0.0f});
    }
    const ReducedRows found = sample->reduce(logits, plan);
    for (size_t r = 0; r < n; ++r) {
        CHECK_EQ(found.ids[int64_t(r) * found.k], 7);
    }
    const std::vector<int32_t> last = {int32_t(n) - 1};
    const float *row = sample->copy_rows_to_host(logits, last);
    CHECK_EQ(row[last[0] % kVocabulary], 1.0f);
}

// Fails each allocation of a large call in turn, between small calls.
template <typename Check> void check_without_memory(const Check &check) {
    fake::FailingMemory memory;
    const device::Stream stream(LLAISYS_DEVICE_CPU, 0, 1);
    const Tensor small = rows_of(kSmall), large = rows_of(kLarge);
    int n_failed = 0;
    for (bool is_done = false; !is_done; ++n_failed) {
        DeviceSampler sample(stream);
        check(&sample, small);
        check(&sample, small); // there are two result slots
        memory.fail_at(n_failed);
        try {
            check(&sample, large);
            is_done = true;
        } catch (const Error &error) {
            CHECK(std::string(error.what()).find("the fake allocation failed") !=
                  std::string::npos);
        }
        memory.work();
        check(&sample, small);
        check(&sample, small);
        check(&sample, large);
    }
    CHECK(n_failed > 2);
}

} // namespace

TEST(greedy_sampling_recovers_from_failed_allocations) { check_without_memory(check_greedy); }

TEST(planned_sampling_recovers_from_failed_allocations) { check_without_memory(check_adjusted); }
