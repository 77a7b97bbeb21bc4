// ProcessGroupNCCL over a fake NCCL library and CPU streams: rendezvous, order of calls and failure
// detection. test/cuda runs the real library.
#include "check.hpp"
#include "device_groups.hpp"
#include "fake_nccl.hpp"
#include "parallel/process_group_nccl.hpp"
#include "parallel/tensor_parallel.hpp"
#include "random_collectives.hpp"

#include <thread>

namespace {

using namespace llaisys;
using namespace llaisys::parallel;
using collectives::contains;
using collectives::options_of;
using collectives::run_ranks;
using function::ReduceOpType;
using std::chrono::milliseconds;

// The text that CheckResults throws within a minute; "" when it does not.
std::string failure_of(const ProcessGroup &group) {
    for (int i = 0; i < 6000; ++i) {
        try {
            group.CheckResults();
        } catch (const std::exception &error) {
            return error.what();
        }
        std::this_thread::sleep_for(milliseconds(10));
    }
    return "";
}

} // namespace

TEST(random_collectives_match_the_reference) {
    const fake::Nccl nccl;
    for (const int world : {2, 3}) {
        const auto results = run_ranks(world, [&](int rank) {
            const ProcessGroupNCCL made(options_of("rounds", world, rank));
            const ProcessGroup &group = made;
            const std::string wrong = collectives::run_rounds(group, 500 * uint64_t(world), 300);
            return wrong.empty() ? collectives::run_async_rounds(group, 77, 40) : wrong;
        });
        for (const std::string &result : results) {
            CHECK_EQ(result, "");
        }
    }
    // A rank that leaves last may detect the other as lost and abort.
    CHECK_EQ(fake::nccl_counts().destroyed + fake::nccl_counts().aborted, 5);
}

TEST(group_of_one_calls_nccl) {
    const fake::Nccl nccl;
    const auto group = ProcessGroupFactory::Instance().GetOrCreate("nccl", options_of("one", 1, 0));
    const tensor_t tensor = Tensor::create({3}, LLAISYS_DTYPE_F32);
    const tensor_t other = Tensor::create({3}, LLAISYS_DTYPE_F32);
    std::fill(tensor.as<float>(), tensor.as<float>() + 3, 7.0f);
    group->AllReduce(tensor, ReduceOpType::kAvg);
    group->AllGather(other, tensor);
    CHECK_EQ(other.as<float>()[2], 7.0f);
    group->Scatter(tensor, other, 0);
    group->Gather(other, tensor, 0);
    group->ReduceScatter(other, tensor);
    group->BroadCast(other, 0)->Synchronize();
    CHECK_EQ(other.as<float>()[2], 7.0f);
    CHECK_THROWS(group->Send(tensor, 0), "another rank");
    CHECK_EQ(fake::nccl_counts().ids.load(), 1);
}

TEST(leaving_rank_aborts_waiting_calls) {
    const fake::Nccl nccl;
    const auto results = run_ranks(2, [](int rank) -> std::string {
        auto group = std::make_unique<ProcessGroupNCCL>(options_of("leave", 2, rank));
        const tensor_t tensor = Tensor::create({8}, LLAISYS_DTYPE_F32);
        static_cast<const ProcessGroup &>(*group).AllReduce(tensor);
        if (rank == 1) {
            return ""; // destroyed here
        }
        fake::nccl_counts().is_stuck = true; // as on a GPU: enqueued and never complete
        const std::string reason = failure_of(*group);
        const ProcessGroup &aborted = *group;
        CHECK_THROWS(aborted.AllReduce(tensor), "AllReduce", "group leave", "rank 0 of 2",
                     "rank 1 has left the group");
        return reason;
    });
    CHECK(contains(results[0], "rank 1 has left the group"));
    CHECK_EQ(fake::nccl_counts().aborted.load(), 1);
}

TEST(asynchronous_nccl_error_aborts_the_group_on_all_ranks) {
    const fake::Nccl nccl;
    const auto results = run_ranks(2, [](int rank) -> std::string {
        const ProcessGroupNCCL group(options_of("later", 2, rank));
        const tensor_t tensor = Tensor::create({8}, LLAISYS_DTYPE_F32);
        const auto work =
            static_cast<const ProcessGroup &>(group).AllReduce(tensor, ReduceOpType::kSum, true);
        CHECK(work->WaitBlocking(milliseconds(60000)));
        fake::nccl_counts().async_error = 6;
        const std::string reason = failure_of(group);
        CHECK(!work->IsSuccess());
        CHECK(work->exception() != nullptr);
        return reason;
    });
    for (const std::string &result : results) {
        CHECK(contains(result, "NCCL: a collective: fake failure"));
    }
}

TEST(failed_comm_init_aborts_the_other_ranks) {
    const fake::Nccl nccl;
    fake::nccl_counts().init_fails_on = 1;
    const auto results = run_ranks(2, [](int rank) -> std::string {
        const ProcessGroupNCCL group(options_of("join", 2, rank));
        return failure_of(group);
    });
    CHECK(contains(results[1], "ncclCommInitRank: fake failure"));
    CHECK(contains(results[0], "ncclCommInitRank: fake failure"));
}

TEST(group_without_a_stream_is_rejected) {
    const fake::Nccl nccl;
    GroupOptions options = options_of("none", 1, 0);
    options.stream = nullptr;
    CHECK_THROWS(ProcessGroupNCCL{options}, "group none", "stream");
}

TEST(real_nccl_serves_a_group_of_one_gpu) {
    if (!device::has_runtime(LLAISYS_DEVICE_NVIDIA) ||
        device::runtime_of(LLAISYS_DEVICE_NVIDIA).device_count() == 0) {
        std::printf("skipped: this build or this machine has no GPU\n");
        return;
    }
    const device::Stream gpu(LLAISYS_DEVICE_NVIDIA, 0, 1);
    const auto on_gpu = [&](const std::vector<float> &values, const Shape &shape) {
        Tensor tensor = Tensor::create(shape, LLAISYS_DTYPE_F32, LLAISYS_DEVICE_NVIDIA, 0);
        tensor.load(values.data(), values.size() * sizeof(float));
        return tensor;
    };
    const auto back = [&](const tensor_t &tensor) {
        gpu.synchronize();
        std::vector<float> values(static_cast<size_t>(tensor.elements()));
        tensor.store(values.data(), values.size() * sizeof(float));
        return values;
    };
    GroupOptions options = options_of("gpu", 1, 0);
    options.device = LLAISYS_DEVICE_NVIDIA;
    options.stream = &gpu;
    const auto group = ProcessGroupFactory::Instance().GetOrCreate("nccl", options);

    const std::vector<float> values{1, -2, 3, 4, 5, 6};
    const tensor_t a = on_gpu(values, {6});
    const tensor_t b = on_gpu({0, 0, 0, 0, 0, 0}, {6});
    for (const bool is_async : {false, true}) {
        std::vector<std::shared_ptr<Work>> works;
        for (int op = 0; op < 5; ++op) {
            works.push_back(group->AllReduce(a, ReduceOpType(op), is_async));
        }
        works.push_back(group->AllGather(b, a, is_async));
        works.push_back(group->ReduceScatter(a, b, ReduceOpType::kSum, is_async));
        works.push_back(group->BroadCast(a, 0, is_async));
        works.push_back(group->Scatter(b, a, 0, is_async));
        works.push_back(group->Gather(a, b, 0, is_async));
        for (const auto &work : works) {
            work->Synchronize();
            CHECK(work->IsSuccess());
        }
        CHECK(back(a) == values);
        CHECK(back(b) == values);
    }

    RowParallelLinear layer(3, 2, false, true, true, false, false, group);
    const tensor_t weight = on_gpu({1, 2, 3, 4, 5, 6}, {2, 3});
    layer.Load(gpu, weight, nullptr);
    CHECK(back(layer.Forward({on_gpu({1, 1, 1}, {1, 3})}).front()) == std::vector<float>({6, 15}));
    group->CheckResults();
}
