// Where the time of steps goes. A stage has the time that passes while its scope is the innermost one,
// so the stages never count a moment twice. Costs one look at the clock for each border.
#pragma once

#include "base/nvtx.hpp"
#include "llaisys/models/model.h"

#include <chrono>

namespace llaisys::runtime {

class Profile {
public:
    using Stage = LlaisysStageProfile LlaisysProfile::*;

    // One scope of a stage; scopes of one profile nest like blocks, on one thread. `name` is that of
    // the NVTX range.
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

    // Of the scopes that have ended, since the beginning or the last reset.
    const LlaisysProfile &times() const { return times_; }
    void reset() { times_ = empty(); }

private:
    using Clock = std::chrono::steady_clock;

    static LlaisysProfile empty() {
        LlaisysProfile times{};
        times.struct_size = sizeof times;
        return times;
    }
    // The time since the last border goes to the stage that ends here; null: outside of all.
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
