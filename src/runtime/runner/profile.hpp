// Time per stage of steps. Time counts for the innermost scope only. A scope costs two clock reads.
#pragma once

#include "base/nvtx.hpp"
#include "llaisys/models/model.h"

#include <chrono>

namespace llaisys::runtime {

class Profile {
public:
    using Stage = LlaisysStageProfile LlaisysProfile::*;

    // A scope of a stage; scopes of a profile nest, on one thread.
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

    // `name`: of the NVTX range, STAGE/PART.
    Scope prepare(const char *name) { return {*this, &LlaisysProfile::prepare, name}; }
    Scope attn_meta(const char *name) { return {*this, &LlaisysProfile::attn_meta, name}; }
    Scope forward(const char *name) { return {*this, &LlaisysProfile::forward, name}; }
    Scope sample(const char *name) { return {*this, &LlaisysProfile::sample, name}; }
    Scope memcpy(const char *name) { return {*this, &LlaisysProfile::memcpy, name}; }

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
