// The object behind an LlaisysModel handle.
#pragma once

#include "capi/guard.hpp"
#include "models/model.hpp"
#include "parallel/process_group.hpp"
#include "runtime/runner/step_pipeline.hpp"

#include <memory>
#include <string>
#include <vector>

namespace llaisys::capi {

// Throws naming the first field that is invalid for any model.
void check_create_params(const LlaisysModelCreateParams &params);

// Effective parameters, with copies of strings and arrays.
class OwnedParams {
public:
    explicit OwnedParams(const LlaisysModelCreateParams &params);
    OwnedParams(const OwnedParams &) = delete;
    OwnedParams &operator=(const OwnedParams &) = delete;
    LlaisysModelCreateParams &get() { return params_; }
    const LlaisysModelCreateParams &get() const { return params_; }

private:
    const char *copy(const char *text, const char *fallback);

    LlaisysModelCreateParams params_;
    std::vector<int32_t> device_ids_;
    std::vector<std::string> strings_;
};

// See llaisysModelScratchBytes and llaisysModelLoraBytes.
int64_t scratch_bytes(const LlaisysModelCreateParams &given, int32_t n_outputs, int32_t max_loras,
                      int32_t max_rank);
int64_t lora_bytes(const LlaisysModelCreateParams &given, int32_t max_loras, int32_t max_rank);

} // namespace llaisys::capi

struct LlaisysModel {
    // The parameters must have passed check_create_params.
    explicit LlaisysModel(const LlaisysModelCreateParams &given);

    // Waits until no launched step runs. For every call except Launch and Collect.
    llaisys::runtime::ModelRunner &runner() {
        pipeline.wait();
        return runner_;
    }

    // Calls of all groups of this rank.
    void abort_groups(const std::string &reason) const;
    void check_groups() const; // see CheckResults
    // Throws in a stage before the last one, which has no logits to sample.
    void require_last_stage() const;

    llaisys::capi::OwnedParams params;
    llaisys::device::Stream stream;
    std::shared_ptr<llaisys::parallel::ProcessGroup> group;  // tensor-parallel ranks
    std::shared_ptr<llaisys::parallel::ProcessGroup> stages; // of a pipeline; null: one stage
    std::unique_ptr<llaisys::models::Model> model;
    llaisys::runtime::ModelRunner runner_;
    llaisys::runtime::StepPipeline pipeline;
};
