// Time per stage of steps. Time counts for the innermost scope only. A scope costs two clock reads.
#pragma once

#include "base/nvtx.hpp"
#include "llaisys/models/model.h"

#include <chrono>

namespace llaisys::runtime {

class Profile {
public:
    using Stage = LlaisysStageProfile LlaisysProfile::*;

    // A scope of a stage; scopes of a profile nest, on one thread. `name`: of the NVTX range.
    class Scope {
    public:
        Scope(Profile &profile, Stage stage, const char *name)
            : range_(name), profile_(profile), outer_(profile.current_) {
            profile.enter(stage);
            ++(profile.times_.*stage).count;
        }
        ~Scope() { profile_.enter(outer_); }
        Scope(const Scope &) = delete;
        Scope &operator=(const Scope &) = delete;

    private:
        NvtxRange range_;
        Profile &profile_;
        Stage outer_;
    };

    Scope prepare() { return {*this, &LlaisysProfile::prepare, "prepare"}; }
    Scope attn_meta() { return {*this, &LlaisysProfile::attn_meta, "attn_meta"}; }
    Scope forward() { return {*this, &LlaisysProfile::forward, "forward"}; }
    Scope sample() { return {*this, &LlaisysProfile::sample, "sample"}; }
    Scope memcpy() { return {*this, &LlaisysProfile::memcpy, "memcpy"}; }

    // Times of ended scopes since construction or the last reset.
    const LlaisysProfile &times() const { return times_; }
    void reset() { times_ = empty(); }

private:
    using Clock = std::chrono::steady_clock;

    static LlaisysProfile empty() {
        LlaisysProfile times{};
        times.struct_size = sizeof times;
        return times;
    }
    // Adds the time since the last switch to the current stage and switches to `stage`; null: none.
    void enter(Stage stage) {
        const Clock::time_point now = Clock::now();
        if (current_ != nullptr) {
            (times_.*current_).seconds += std::chrono::duration<double>(now - border_).count();
        }
        current_ = stage;
        border_ = now;
    }

    LlaisysProfile times_ = empty();
    Stage current_ = nullptr;
    Clock::time_point border_;
};

} // namespace llaisys::runtime
