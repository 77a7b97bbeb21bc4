// Process groups of threads, and groups of one rank.
#include "check.hpp"
#include "parallel/process_group_host.hpp"
#include "random_collectives.hpp"

#include <atomic>
#include <functional>
#include <thread>

namespace {

using namespace llaisys;
using namespace llaisys::parallel;
using collectives::contains;
using collectives::run_ranks;
using function::ReduceOpType;
using std::chrono::milliseconds;

GroupOptions options_of(const std::string &name, int world, int rank) {
    GroupOptions options;
    options.name = name;
    options.init_method = "test";
    options.ranks.clear();
    for (int i = 0; i < world; ++i) {
        options.ranks.push_back(i);
    }
    options.rank = rank;
    options.timeout = milliseconds(60000);
    return options;
}

tensor_t ones(int64_t n) {
    Tensor tensor = Tensor::create({n}, LLAISYS_DTYPE_F32);
    std::fill(tensor.as<float>(), tensor.as<float>() + n, 1.0f);
    return tensor;
}

} // namespace

TEST(random_collectives_match_the_reference) {
    for (const int world : {2, 3, 5}) {
        const auto results = run_ranks(world, [&](int rank) {
            const ProcessGroupThreads made(options_of(text("rounds", world), world, rank));
            const ProcessGroup &group = made;
            return collectives::run_rounds(group, 1000 * uint64_t(world), 1200);
        });
        for (const std::string &result : results) {
            CHECK_EQ(result, "");
        }
    }
}

TEST(asynchronous_calls_may_be_waited_for_in_any_order) {
    const auto results = run_ranks(3, [](int rank) {
        const ProcessGroupThreads made(options_of("async", 3, rank));
        const ProcessGroup &group = made;
        return collectives::run_async_rounds(group, 77, 60);
    });
    for (const std::string &result : results) {
        CHECK_EQ(result, "");
    }
}

TEST(calls_run_in_submission_order) {
    const auto results = run_ranks(2, [](int rank) -> std::string {
        const ProcessGroupThreads made(options_of("behind", 2, rank));
        const ProcessGroup &group = made;
        for (int i = 0; i < 200; ++i) {
            const tensor_t tensor = ones(1000);
            const auto work = group.AllReduce(tensor, ReduceOpType::kSum, true);
            group.AllReduce(tensor); // 1 -> 2 -> 4, or the ranks would not agree
            if (!work->IsCompleted() || tensor.as<float>()[999] != 4.0f) {
                return "out of order";
            }
        }
        return "";
    });
    CHECK_EQ(results[0], "");
    CHECK_EQ(results[1], "");
}

TEST(float_sums_are_bitwise_identical_on_all_ranks_and_in_all_runs) {
    // A sum in another order would round differently.
    const float values[] = {1e8f, 1.0f, -1e8f, 3.0f};
    float in_order = values[0];
    for (int r = 1; r < 4; ++r) {
        in_order += values[r];
    }
    for (const int64_t n : {int64_t(7), int64_t(20000)}) { // reduced by every rank, and in shards
        for (int run = 0; run < 20; ++run) {
            std::vector<float> sums(4);
            run_ranks(4, [&](int rank) {
                const ProcessGroupThreads made(options_of("bits", 4, rank));
                const ProcessGroup &group = made;
                const tensor_t tensor = Tensor::create({n}, LLAISYS_DTYPE_F32);
                std::fill(tensor.as<float>(), tensor.as<float>() + n, values[rank]);
                group.AllReduce(tensor);
                sums[size_t(rank)] = tensor.as<float>()[n - 1];
                return "";
            });
            for (const float sum : sums) {
                CHECK_EQ(bits_of(sum), bits_of(in_order));
            }
        }
    }
}

TEST(error_of_a_rank_that_has_left_names_call_group_rank_and_device) {
    const auto results = run_ranks(2, [](int rank) -> std::string {
        const ProcessGroupThreads made(options_of("TP0", 2, rank));
        const ProcessGroup &group = made;
        group.AllReduce(ones(8));
        if (rank == 1) {
            return "";
        }
        group.AllReduce(ones(8));
        return "nothing was thrown";
    });
    for (const char *part :
         {"AllReduce", "group TP0", "rank 0 of 2", "cpu:0", "rank 1 has left the group"}) {
        CHECK(contains(results[0], part));
    }
}

TEST(exception_of_a_rank_aborts_the_group_with_its_reason) {
    const auto results = run_ranks(3, [](int rank) -> std::string {
        const ProcessGroupThreads made(options_of("thrower", 3, rank));
        const ProcessGroup &group = made;
        const auto step = [&] {
            group.AllReduce(ones(8));
            if (rank == 1) {
                fail(LLAISYS_ERROR_MEMORY, "no memory for the step");
            }
            group.AllReduce(ones(8));
        };
        try {
            abort_on_error(group, step);
        } catch (const Error &error) {
            // Later calls fail with the same reason.
            try {
                group.AllGather(ones(24), ones(8));
            } catch (const Error &again) {
                return again.what();
            }
        }
        return "nothing was thrown";
    });
    for (const std::string &result : results) {
        CHECK(contains(result, "AllGather"));
        CHECK(contains(result, "rank 1: no memory for the step"));
    }
}

TEST(work_reports_the_failure_of_an_asynchronous_call) {
    const auto results = run_ranks(2, [](int rank) -> std::string {
        const ProcessGroupThreads made(options_of("late", 2, rank));
        const ProcessGroup &group = made;
        group.AllReduce(ones(8)); // both have joined
        if (rank == 1) {
            group.Abort("rank 1 gave up");
            return "";
        }
        const auto work = group.AllReduce(ones(8), ReduceOpType::kSum, true);
        if (work->WaitBlocking() || !work->IsCompleted() || work->IsSuccess() ||
            work->WaitNonBlocking() || work->exception() == nullptr) {
            return "a failure that was not seen";
        }
        work->Synchronize();
        return "nothing was thrown";
    });
    CHECK(contains(results[0], "AllReduce: group late, rank 0 of 2, cpu:0: rank 1 gave up"));
}

TEST(mismatched_calls_fail_on_all_ranks_and_name_both_calls) {
    const auto results = run_ranks(2, [](int rank) -> std::string {
        const ProcessGroupThreads made(options_of("apart", 2, rank));
        const ProcessGroup &group = made;
        group.AllReduce(ones(8 + rank));
        return "nothing was thrown";
    });
    for (const std::string &result : results) {
        CHECK(contains(result, "AllReduce(sum, f32, 8 elements)"));
        CHECK(contains(result, "AllReduce(sum, f32, 9 elements)"));
    }
}

TEST(call_times_out_without_the_other_rank) {
    GroupOptions options = options_of("alone", 2, 0);
    options.timeout = milliseconds(80);
    const ProcessGroupThreads made(options);
    const ProcessGroup &group = made;
    const auto start = std::chrono::steady_clock::now();
    CHECK_THROWS(group.AllReduce(ones(1)), "group alone", "rank 1 did not respond within 80 ms");
    CHECK(std::chrono::steady_clock::now() - start >= milliseconds(80));
}

TEST(wait_blocking_times_out_while_the_call_runs) {
    std::atomic<bool> may_join{false};
    const auto results = run_ranks(2, [&](int rank) -> std::string {
        const ProcessGroupThreads made(options_of("patience", 2, rank));
        const ProcessGroup &group = made;
        if (rank == 1) {
            while (!may_join.load()) {
                std::this_thread::yield();
            }
            group.AllReduce(ones(1));
            return "";
        }
        const auto work = group.AllReduce(ones(1), ReduceOpType::kSum, true);
        const bool early = work->WaitBlocking(milliseconds(5)) || work->IsCompleted();
        may_join.store(true);
        return early || !work->WaitBlocking() ? "wrong" : "";
    });
    CHECK_EQ(results[0], "");
    CHECK_EQ(results[1], "");
}

TEST(arguments_are_checked_before_anything_is_sent) {
    const ProcessGroupThreads made(options_of("checked", 2, 0));
    const ProcessGroup &group = made;
    const tensor_t bytes = Tensor::create({4}, LLAISYS_DTYPE_U8);
    const tensor_t turned = [] {
        const int order[] = {1, 0};
        return Tensor::create({2, 3}, LLAISYS_DTYPE_F32).permute(order);
    }();
    CHECK_THROWS(group.AllReduce(bytes), "group checked, rank 0 of 2, cpu:0", "dtype", "u8");
    CHECK_THROWS(group.AllReduce(tensor_t()), "tensor: got none");
    CHECK_THROWS(group.AllReduce(turned), "contiguous", "[1, 3]");
    CHECK_THROWS(group.AllReduce(ones(1), ReduceOpType(9)), "reduce_op", "9");
    CHECK_THROWS(group.AllGather(ones(3), ones(2)), "output", "2 times", "3 and 2");
    CHECK_THROWS(group.ReduceScatter(ones(2), ones(3)), "input", "2 times");
    CHECK_THROWS(group.BroadCast(ones(1), 2), "root must be in [0, 2), got 2");
    CHECK_THROWS(group.Send(ones(1), 0), "dest_rank must be another rank");
    CHECK_THROWS(group.Recv(ones(1), -1), "src_rank must be in [0, 2), got -1");
    CHECK_THROWS(group.GetGroupRank(5), "rank 5 is not in group checked");
    CHECK_THROWS(ProcessGroupThreads(options_of("checked", 2, 0)), "rank 0 has already joined");
    CHECK_THROWS(ProcessGroupThreads(options_of("checked", 3, 1)), "2 ranks", "for 3");
}

TEST(global_ranks_map_to_group_ranks) {
    GroupOptions options = options_of("places", 2, 0);
    options.ranks = {4, 7};
    options.rank = 7;
    const ProcessGroupThreads made(options);
    const ProcessGroup &group = made;
    CHECK_EQ(group.rank(), 1);
    CHECK_EQ(group.GetGroupRank(4), 0);
    CHECK_EQ(group.GetGroupRank(7), 1);
}

TEST(a_group_of_one_does_nothing) {
    const ProcessGroupOne made;
    const ProcessGroup &group = made;
    const tensor_t tensor = ones(5);
    for (const auto op : {ReduceOpType::kSum, ReduceOpType::kProd, ReduceOpType::kMin,
                          ReduceOpType::kMax, ReduceOpType::kAvg}) {
        CHECK(group.AllReduce(tensor, op, true)->IsSuccess());
    }
    CHECK(group.BroadCast(tensor, 0, false)->WaitBlocking());
    CHECK_EQ(tensor.as<float>()[4], 1.0f);
    const tensor_t gathered = Tensor::create({5}, LLAISYS_DTYPE_F32);
    group.AllGather(gathered, tensor, false);
    CHECK_EQ(gathered.as<float>()[4], 1.0f);
    const tensor_t scattered = Tensor::create({5}, LLAISYS_DTYPE_F32);
    group.Scatter(scattered, tensor, 0, false);
    CHECK_EQ(scattered.as<float>()[0], 1.0f);
    CHECK_THROWS(group.Send(tensor, 0, false), "another rank");
}

TEST(factory_returns_the_live_group) {
    ProcessGroupFactory &factory = ProcessGroupFactory::Instance();
    const auto first = factory.GetOrCreate("threads", options_of("kept", 2, 0));
    CHECK(factory.GetOrCreate("threads", options_of("kept", 2, 0)) == first);
    CHECK(factory.GetOrCreate("threads", options_of("kept", 2, 1)) != first);
    CHECK_EQ(factory.GetDefaultProcessGroup()->size(), 1);
    {
        const auto named = factory.GetOrCreate("threads", options_of("default", 2, 0));
        CHECK(factory.GetDefaultProcessGroup() == named);
    }
    CHECK_EQ(factory.GetDefaultProcessGroup()->size(), 1);
    CHECK_EQ(factory.GetOrCreate("", options_of("single", 1, 0))->size(), 1);
    CHECK_THROWS(factory.GetOrCreate("pigeons", options_of("far", 2, 0)), "pigeons");
}
