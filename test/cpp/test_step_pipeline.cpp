// Asynchronous steps: order, tokens sampled by the previous step, failures and later steps.
#include "fake_device.hpp"
#include "fake_model.hpp"

#include "runtime/runner/step_pipeline.hpp"

#include <atomic>
#include <chrono>
#include <memory>

using namespace fake;

namespace {

// Greedy sampling of the rows of a step, with optional logprobs; other parameters are neutral.
struct Sample {
    explicit Sample(int32_t n, double n_logprobs = -1)
        : temperatures(size_t(n), 0.0), counts(size_t(n), n_logprobs), top_ks(size_t(n), 0.0),
          presences(size_t(n), 0.0), seeds(size_t(n), 5),
          numbers{{"temperature", temperatures.data()},
                  {"n_logprobs", counts.data()},
                  {"top_k", top_ks.data()},
                  {"presence_penalty", presences.data()}} {
        sampling.struct_size = sizeof sampling;
        sampling.n_rows = n;
        sampling.numbers = numbers;
        sampling.n_numbers = 4;
        sampling.seeds = seeds.data();
    }
    std::vector<double> temperatures, counts, top_ks, presences;
    std::vector<uint64_t> seeds;
    LlaisysSamplingNumber numbers[4];
    LlaisysSamplingMetadata sampling{};
};

struct Pipe : Rig {
    using Rig::Rig;
    // The fake model's next token is token + 1.
    int64_t launch(const Step &step, const Sample &sample) {
        return pipeline.launch(step.view(), sample.sampling);
    }
    int64_t collect(int64_t ticket) {
        int32_t id = -1;
        CHECK_EQ(pipeline.collect(ticket, &id), LLAISYS_DECODE_OK);
        return id;
    }
    StepPipeline pipeline{stream, runner};
};

// Starts with the prompt 7, 8 (first); each `next` is launched before its input token is known.
// Returns the ticket of the last step, which samples 20. The steps must outlive it.
int64_t count_from_7(Pipe &pipe, const Sample &sample, const Step &first, const Step &next) {
    int64_t ticket = pipe.launch(first, sample);
    for (int64_t expected = 9; expected < 20; ++expected) {
        const int64_t behind = pipe.launch(next, sample);
        CHECK_EQ(pipe.collect(ticket), expected);
        ticket = behind;
    }
    return ticket;
}

} // namespace

TEST(step_reads_the_token_sampled_by_the_previous_one) {
    Pipe pipe;
    const Sample sample(1);
    const Step first = tokens({7, 8}), next = tokens({-1});
    const int64_t ticket = count_from_7(pipe, sample, first, next);
    CHECK_EQ(pipe.collect(ticket), 20);
    CHECK(pipe.model.seen.back().visible[0] ==
          Ints({7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19}));
}

TEST(step_is_queued_while_the_previous_one_is_in_flight) {
    LateEvents events;
    Pipe pipe;
    const Sample sample(1);
    const Step first = tokens({7, 8}), next = tokens({-1});
    const int64_t ticket =
        count_from_7(pipe, sample, first, next); // each event completes with the next step
    events.complete_all();
    CHECK_EQ(pipe.collect(ticket), 20);
    CHECK(pipe.model.seen.back().visible[0] ==
          Ints({7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19}));
}

TEST(tokens_of_a_queued_step_are_indexed_by_sampled_row) {
    LateEvents events;
    Pipe pipe;
    Sample two(2), swapped(2);
    const std::vector<int32_t> rows = {1, 0};
    swapped.sampling.rows = rows.data();
    Step first = tokens({3, 30});
    first.seq_ids = {0, 1};
    first.logits = {1, 1};
    Step crossed = first;
    crossed.tokens = {-2, -1};
    const Step third = tokens({-3});
    const Sample one(1);
    pipe.launch(first, swapped); // samples 31, 4
    const int64_t ticket = pipe.launch(crossed, two);
    const int64_t unknown = pipe.launch(third, one); // the previous step samples two
    events.complete_all();
    int32_t ids[2] = {};
    CHECK_EQ(pipe.pipeline.collect(ticket, ids), LLAISYS_DECODE_OK);
    CHECK(ids[0] == 5 && ids[1] == 32);
    CHECK_THROWS(pipe.pipeline.collect(unknown, ids), "token_ids[0] is -3", "sampled 2 ids");
}

TEST(rejected_step_does_not_affect_the_previous_one) {
    LateEvents events;
    Pipe pipe;
    const Sample sample(1);
    pipe.model.forwards_until_failure = 2;
    const Step first = tokens({7}), next = tokens({-1}), other = tokens({20});
    const int64_t good = pipe.launch(first, sample);
    const int64_t bad = pipe.launch(next, sample);
    const int64_t behind = pipe.launch(other, sample);
    events.complete_all();
    int32_t id = -1;
    CHECK_EQ(pipe.collect(good), 8);
    CHECK_THROWS(pipe.pipeline.collect(bad, &id), "the fake forward failed");
    CHECK_EQ(pipe.pipeline.collect(behind, &id), LLAISYS_DECODE_ABORTED);
    CHECK_EQ(pipe.collect(pipe.launch(other, sample)), 21);
}

TEST(device_error_fails_the_queued_step) {
    LateEvents events;
    Pipe pipe;
    const Sample sample(1);
    const Step first = tokens({7}), other = tokens({20});
    const int64_t queued = pipe.launch(first, sample);
    events.fail();
    int32_t id = -1;
    CHECK_THROWS(pipe.pipeline.collect(queued, &id), "the fake device is broken");
    CHECK_THROWS(pipe.pipeline.collect(pipe.launch(other, sample), &id),
                 "the fake device is broken");
}

TEST(host_sampling_waits_for_the_queued_step) {
    LateEvents events;
    Pipe pipe;
    const Sample sample(1), with_logprobs(1, 2);
    const Step first = tokens({7}), next = tokens({-1});
    const int64_t a = pipe.launch(first, sample);
    const int64_t b = pipe.launch(next, with_logprobs);
    events.complete_all();
    CHECK_EQ(pipe.collect(a), 8);
    CHECK_EQ(pipe.collect(b), 9);
    CHECK_EQ(pipe.pipeline.logprobs(0).n, 3);
}

// Each event completes with the next step, so that no result arrives before the next step is
// queued.
TEST(random_sampling_is_queued_too) {
    const Step first = tokens({7, 8}), next = tokens({-1});
    std::vector<std::vector<float>> sampled; // ids, ranks and logprobs, synchronous and queued
    for (const bool is_late : {false, true}) {
        std::unique_ptr<LateEvents> events = is_late ? std::make_unique<LateEvents>() : nullptr;
        std::vector<std::unique_ptr<Sample>> samples; // of each step
        for (uint64_t seed = 0; seed < 11; ++seed) {
            samples.push_back(std::make_unique<Sample>(1, 2));
            samples.back()->temperatures[0] = 3;
            samples.back()->top_ks[0] = 20;
            samples.back()->seeds[0] = seed;
        }
        Pipe pipe;
        std::vector<float> found;
        int64_t ticket = pipe.launch(first, *samples[0]);
        const auto collect = [&] {
            found.push_back(float(pipe.collect(ticket)));
            const LlaisysLogprobs logprobs = pipe.pipeline.logprobs(0);
            found.push_back(float(logprobs.sampled_rank));
            found.insert(found.end(), logprobs.logprobs, logprobs.logprobs + logprobs.n);
        };
        for (size_t i = 1; i < samples.size(); ++i) {
            const int64_t behind = pipe.launch(next, *samples[i]);
            if (!is_late) {
                pipe.pipeline.wait();
            }
            collect();
            ticket = behind;
        }
        if (is_late) {
            events->complete_all();
        }
        collect();
        sampled.push_back(found);
    }
    CHECK(sampled[0] == sampled[1]);
    CHECK_EQ(sampled[0].size(), 11u * 5);
}

TEST(penalties_include_the_token_of_the_step_in_flight) {
    LateEvents events;
    Pipe pipe;
    const int64_t prompt = 7;
    pipe.runner.sampler().reset(0, &prompt, 1);
    Sample sample(1);
    sample.presences[0] = 2;
    const Ints seqs = {0};
    sample.sampling.seq_ids = seqs.data();
    const Step step = tokens({7}); // 8 is the best next token, all others are equal
    int64_t ticket = pipe.launch(step, sample);
    for (const int64_t expected : {8, 0, 1, 2}) {
        const int64_t behind = pipe.launch(step, sample);
        CHECK_EQ(pipe.collect(ticket), expected);
        ticket = behind;
    }
    events.complete_all();
    CHECK_EQ(pipe.collect(ticket), 3);
}

TEST(undecided_sampling_reruns_its_step_and_the_next_one) {
    LateEvents events;
    Pipe pipe(512, 0, true);
    const auto at = [](int64_t token, int64_t position) {
        Step step = tokens({token});
        step.positions = {position};
        step.slot_mapping = {int32_t(position)};
        step.batch_seq_ids = {0};
        step.context_lens = {int32_t(position) + 1};
        step.block_tables = {0};
        return step;
    };
    const Step first = at(7, 0), second = at(-1, 1), third = at(-1, 2);
    const Sample sample(1);
    pipe.model.lost_forward = 1;
    const int64_t a = pipe.launch(first, sample);
    const int64_t b = pipe.launch(second, sample);
    CHECK_EQ(pipe.collect(a), 8);
    const int64_t c = pipe.launch(third, sample);
    CHECK_EQ(pipe.collect(b), 9);
    events.complete_all();
    CHECK_EQ(pipe.collect(c), 10);
    CHECK_EQ(pipe.model.seen.size(), 5u);
    CHECK(pipe.model.seen.back().visible[0] == Ints({7, 8, 9}));
}

TEST(ids_follow_the_order_of_sampled_rows) {
    Pipe pipe;
    const Sample two(2);
    Step first = tokens({3, 30});
    first.seq_ids = {0, 1};
    first.logits = {1, 1};
    Step crossed = first;
    crossed.tokens = {-2, -1};
    pipe.launch(first, two);
    const int64_t ticket = pipe.launch(crossed, two);
    int32_t ids[2] = {};
    CHECK_EQ(pipe.pipeline.collect(ticket, ids), LLAISYS_DECODE_OK); // the first is discarded
    CHECK(ids[0] == 32 && ids[1] == 5);
    CHECK_THROWS(pipe.pipeline.collect(ticket - 1, ids), "ticket");
    CHECK_THROWS(pipe.pipeline.collect(ticket, ids), "ticket");
}

TEST(step_after_a_failed_one_is_aborted) {
    Pipe pipe;
    const Sample sample(1);
    const Step first = tokens({7}), next = tokens({-1}), other = tokens({20});
    pipe.model.forwards_until_failure = 2;
    const int64_t good = pipe.launch(first, sample);
    const int64_t bad = pipe.launch(next, sample);
    CHECK_EQ(pipe.collect(good), 8);
    const int64_t behind = pipe.launch(other, sample);
    int32_t id = -1;
    CHECK_THROWS(pipe.pipeline.collect(bad, &id), "the fake forward failed");
    CHECK_EQ(pipe.pipeline.collect(behind, &id), LLAISYS_DECODE_ABORTED);
    CHECK_EQ(id, -1);
    CHECK_EQ(pipe.model.seen.size(), 2u);
    CHECK_EQ(pipe.collect(pipe.launch(other, sample)), 21); // runs: the failure was collected
    const int64_t unknown = pipe.launch(tokens({-2}), sample);
    CHECK_THROWS(pipe.pipeline.collect(unknown, &id), "token_ids[0] is -2", "sampled 1 ids");
}

TEST(failed_sampling_keeps_the_output_rows) {
    Pipe pipe;
    const Step step = tokens({7});
    Sample sample(1);
    sample.temperatures[0] = -3;
    int32_t id = -1;
    const int64_t ticket = pipe.launch(step, sample);
    CHECK_THROWS(pipe.pipeline.collect(ticket, &id), "temperature");
    CHECK_EQ(pipe.runner.output().n_rows(), 1);
    CHECK_EQ(pipe.runner.host_rows()[8], 1.0f);
}

TEST(logprobs_stay_with_their_step) {
    Pipe pipe;
    const Sample with(1, 2), without(1);
    const Step first = tokens({7}), next = tokens({-1});
    const int64_t a = pipe.launch(first, with);
    const int64_t b = pipe.launch(next, without);
    pipe.pipeline.wait();
    CHECK_EQ(pipe.collect(a), 8);
    const LlaisysLogprobs found = pipe.pipeline.logprobs(0);
    CHECK(found.n == 3 && found.ids[0] == 8 && found.ids[1] == 8 && found.sampled_rank == 1);
    CHECK_EQ(pipe.collect(b), 9);
    CHECK_EQ(pipe.pipeline.logprobs(0).n, 0);
    CHECK_THROWS(pipe.pipeline.logprobs(1), "row");
}

TEST(sampled_ids_are_appended_to_existing_histories) {
    Pipe pipe;
    const int64_t prompt = 7;
    pipe.runner.sampler().reset(0, &prompt, 1);
    Sample sample(1);
    const Ints seqs = {0};
    sample.sampling.seq_ids = seqs.data();
    pipe.collect(pipe.launch(tokens({7}), sample));
    pipe.pipeline.wait();
    CHECK(pipe.runner.sampler().has_history(0) && !pipe.runner.sampler().has_history(1));
    const Ints others = {1};
    sample.sampling.seq_ids = others.data();
    pipe.collect(pipe.launch(tokens({8}), sample));
    CHECK(!pipe.runner.sampler().has_history(1));
}

TEST(launch_does_not_block_while_a_step_runs) {
    Pipe pipe;
    std::atomic<bool> may_end{false};
    std::atomic<int> n_inside{0};
    pipe.model.inspect = [&] {
        ++n_inside;
        while (!may_end) {
            std::this_thread::yield();
        }
    };
    const Sample sample(1);
    const Step first = tokens({7}), next = tokens({-1});
    const int64_t a = pipe.launch(first, sample);
    const int64_t b = pipe.launch(next, sample);
    while (n_inside == 0) {
        std::this_thread::yield();
    }
    CHECK_EQ(int(n_inside), 1); // the second waits for the first
    may_end = true;
    CHECK_EQ(pipe.collect(a), 8);
    CHECK_EQ(pipe.collect(b), 9);
}

TEST(uncollected_steps_are_limited_and_freed_with_the_pipeline) {
    const Sample sample(1);
    const Step step = tokens({7});
    {
        Pipe pipe;
        for (size_t i = 0; i < StepPipeline::kMaxInFlight; ++i) {
            pipe.launch(step, sample);
        }
        CHECK_THROWS(pipe.launch(step, sample), "at most 8");
    }
    Pipe pipe;
    CHECK_THROWS(pipe.launch(Step(), sample), "n_tokens");
    Step embedded;
    embedded.embd = {1, 2, 3};
    CHECK_THROWS(pipe.launch(embedded, sample), "embd");
    pipe.pipeline.wait(); // nothing launched
}
