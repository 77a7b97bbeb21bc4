// The device sampler without memory: the call fails and later calls succeed.
#include "check.hpp"
#include "fake_device.hpp"
#include "runtime/runner/device_sampler.hpp"
#include "runtime/runner/sampler.hpp"
#include "sample_rows_reference.hpp"

#include <numeric>
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

// Samples all rows; with bias: token 7 is the best of every row.
void check_sampling(DeviceSampler *device, const Tensor &logits, bool with_bias) {
    const auto n = size_t(logits.size(0));
    const device::Stream stream(LLAISYS_DEVICE_CPU, 0, 1);
    const Sampler sampler(stream, kVocabulary);
    std::vector<int32_t> bias_offsets(n + 1);
    std::iota(bias_offsets.begin(), bias_offsets.end(), 0);
    const std::vector<int32_t> bias_ids(n, 7);
    const std::vector<float> bias_values(n, 5.0f);
    const std::vector<double> temperatures(n, 0.0);
    const LlaisysSamplingNumber temperature{"temperature", temperatures.data()};
    LlaisysSamplingMetadata sampling{};
    sampling.n_rows = int32_t(n);
    sampling.numbers = &temperature;
    sampling.n_numbers = 1;
    if (with_bias) {
        sampling.bias_offsets = bias_offsets.data();
        sampling.bias_ids = bias_ids.data();
        sampling.bias_values = bias_values.data();
    }
    SamplingPlan plan;
    sampler.plan(sampling, sampling.n_rows, &plan);
    CHECK_EQ(plan.is_greedy, !with_bias);
    std::vector<int32_t> ids(n), undecided;
    device->finish(device->queue(logits, plan), sampling, ids.data(), &undecided);
    CHECK(undecided.empty());
    for (size_t r = 0; r < n; ++r) {
        CHECK_EQ(ids[r], with_bias ? 7 : int32_t(r % kVocabulary));
    }
    const std::vector<int32_t> last = {int32_t(n) - 1};
    const float *row = device->copy_rows_to_host(logits, last);
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

TEST(greedy_sampling_recovers_from_failed_allocations) {
    check_without_memory(
        [](DeviceSampler *device, const Tensor &logits) { check_sampling(device, logits, false); });
}

TEST(planned_sampling_recovers_from_failed_allocations) {
    check_without_memory(
        [](DeviceSampler *device, const Tensor &logits) { check_sampling(device, logits, true); });
}
