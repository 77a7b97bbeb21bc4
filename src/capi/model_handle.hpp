// What a model handle is made of, and how it comes out of its parameters.
#pragma once

#include "capi/guard.hpp"
#include "models/model.hpp"
#include "parallel/process_group.hpp"
#include "runtime/runner/step_pipeline.hpp"

#include <memory>
#include <string>
#include <vector>

namespace llaisys::capi {

// Throws naming the first field that is wrong whatever the model is.
void check_create_params(const LlaisysModelCreateParams &params);

// The parameters that are in force, with strings and arrays of its own.
class OwnedParams {
public:
    explicit OwnedParams(const LlaisysModelCreateParams &params);
    OwnedParams(const OwnedParams &) = delete;
    OwnedParams &operator=(const OwnedParams &) = delete;
    LlaisysModelCreateParams &get() { return params_; }
    const LlaisysModelCreateParams &get() const { return params_; }

private:
    const char *keep(const char *given, const char *otherwise);

    LlaisysModelCreateParams params_;
    std::vector<int32_t> device_ids_;
    std::vector<std::string> strings_;
};

} // namespace llaisys::capi

struct LlaisysModel {
    // Parameters that have passed check_create_params; defaults are filled in.
    explicit LlaisysModel(const LlaisysModelCreateParams &given);

    // When no launched step runs any more: for every call but Launch and Collect.
    llaisys::runtime::ModelRunner &runner() {
        pipeline.wait();
        return own_runner;
    }

    llaisys::capi::OwnedParams params;
    llaisys::device::Stream stream;
    std::shared_ptr<llaisys::parallel::ProcessGroup> group;
    std::unique_ptr<llaisys::models::Model> model;
    llaisys::runtime::ModelRunner own_runner;
    llaisys::runtime::StepPipeline pipeline;
};
