// ProcessGroupPeer over fake peer memory and CPU streams: rendezvous, chunks, order of calls and
// failures. test/cuda runs the kernels.
#include "check.hpp"
#include "device_groups.hpp"
#include "fake_nccl.hpp"
#include "fake_peer.hpp"
#include "parallel/process_group_nccl.hpp"
#include "parallel/process_group_peer.hpp"
#include "random_collectives.hpp"

namespace {

using namespace llaisys;
using namespace llaisys::parallel;
using collectives::contains;
using collectives::options_of;
using collectives::run_ranks;

} // namespace

TEST(random_collectives_over_peer_memory_match_the_reference) {
    const fake::PeerDevice device;
    for (const int world : {2, 3}) {
        const auto results = run_ranks(world, [&](int rank) {
            const auto group = ProcessGroupFactory::Instance().GetOrCreate(
                "peer", options_of("rounds", world, rank));
            const std::string wrong = collectives::run_rounds(*group, 900 * uint64_t(world), 200);
            return wrong.empty() ? collectives::run_async_rounds(*group, 78, 30) : wrong;
        });
        for (const std::string &result : results) {
            CHECK_EQ(result, "");
        }
    }
    CHECK_EQ(fake::peer_counts().areas.load(), 0);
    CHECK_EQ(fake::peer_counts().mapped.load(), 0);
}

TEST(large_tensors_are_reduced_and_gathered_in_chunks) {
    const fake::PeerDevice device;
    const int64_t n = kPeerChunk / 4 + 777; // f32: two chunks
    const auto results = run_ranks(2, [&](int rank) -> std::string {
        const ProcessGroupPeer made(options_of("chunks", 2, rank));
        const ProcessGroup &group = made;
        const tensor_t tensor = Tensor::create({n}, LLAISYS_DTYPE_F32);
        for (int64_t i = 0; i < n; ++i) {
            tensor.as<float>()[i] = float(i % 1000) + float(rank);
        }
        group.AllReduce(tensor);
        const tensor_t all = Tensor::create({2 * n}, LLAISYS_DTYPE_F32);
        group.AllGather(all, tensor);
        for (int64_t i = 0; i < 2 * n; ++i) {
            if (all.as<float>()[i] != float(2 * (i % n % 1000) + 1)) {
                return text("element ", i, ": ", all.as<float>()[i]);
            }
        }
        return "";
    });
    CHECK_EQ(results[0], "");
    CHECK_EQ(results[1], "");
    CHECK_EQ(fake::peer_counts().all_reduces.load(), 4); // two chunks on two ranks
}

TEST(sums_are_added_in_one_pass) {
    const fake::PeerDevice device;
    const int64_t n = kPeerChunk / 2 + 5; // bf16: two chunks
    const auto results = run_ranks(3, [&](int rank) -> std::string {
        const ProcessGroupPeer made(options_of("add", 3, rank));
        const ProcessGroup &group = made;
        const tensor_t sum = Tensor::create({n}, LLAISYS_DTYPE_F32);
        const tensor_t terms = Tensor::create({n}, LLAISYS_DTYPE_BF16);
        for (int64_t i = 0; i < n; ++i) {
            sum.as<float>()[i] = float(i);
            terms.as<bf16_t>()[i] = from_f32<bf16_t>(float(rank + 1));
        }
        if (!group.AllReduceAdd(sum, terms)) {
            return "not supported";
        }
        for (int64_t i = 0; i < n; ++i) {
            if (sum.as<float>()[i] != float(i) + 6) {
                return text("element ", i, ": ", sum.as<float>()[i]);
            }
        }
        try {
            group.AllReduceAdd(terms, sum);
        } catch (const Error &error) {
            return contains(error.what(), "sum must be f32") ? "" : error.what();
        }
        return "accepted a sum of bf16";
    });
    for (const std::string &result : results) {
        CHECK_EQ(result, "");
    }
}

TEST(leaving_rank_ends_waiting_kernels) {
    const fake::PeerDevice device;
    const auto results = run_ranks(2, [](int rank) -> std::string {
        const ProcessGroupPeer made(options_of("leave", 2, rank));
        if (rank == 1) {
            return ""; // destroyed here
        }
        const ProcessGroup &group = made;
        const tensor_t tensor = Tensor::create({8}, LLAISYS_DTYPE_F32);
        group.AllReduce(tensor); // the fake kernel spins until the group is aborted
        try {
            group.CheckResults();
        } catch (const std::exception &error) {
            return error.what();
        }
        return "no failure";
    });
    CHECK(contains(results[0], "rank 1 has left the group"));
}

TEST(unreachable_memory_fails_on_all_ranks_and_leaks_nothing) {
    const fake::PeerDevice device;
    fake::peer_counts().map_fails_on = 0;
    const auto results = run_ranks(2, [](int rank) -> std::string {
        const ProcessGroupPeer group(options_of("map", 2, rank));
        return "joined";
    });
    for (const std::string &result : results) {
        CHECK(contains(result, "fake GPUs without a link"));
    }
    CHECK_EQ(fake::peer_counts().areas.load(), 0);
}

TEST(nccl_group_uses_peer_memory_for_small_sums) {
    const fake::PeerDevice device;
    const fake::Nccl nccl;
    for (const bool is_linked : {true, false}) {
        fake::peer_counts().map_fails_on = is_linked ? -1 : 0;
        fake::peer_counts().all_reduces = 0;
        const auto results = run_ranks(2, [&](int rank) -> std::string {
            const ProcessGroupNCCL made(options_of(is_linked ? "linked" : "apart", 2, rank));
            const ProcessGroup &group = made;
            const tensor_t small = Tensor::create({1000}, LLAISYS_DTYPE_F32);
            const tensor_t large = Tensor::create({(1 << 18) + 1}, LLAISYS_DTYPE_F32);
            small.as<float>()[999] = large.as<float>()[1 << 18] = float(rank + 1);
            group.AllReduce(small);
            group.AllReduce(large);
            const bool is_right = small.as<float>()[999] == 3 && large.as<float>()[1 << 18] == 3;
            if (group.AllReduceAdd(large, large) || group.AllReduceAdd(small, small) != is_linked) {
                return "wrong choice";
            }
            return is_right && small.as<float>()[999] == (is_linked ? 9 : 3) ? "" : "wrong";
        });
        CHECK_EQ(results[0], "");
        CHECK_EQ(results[1], "");
        CHECK_EQ(fake::peer_counts().all_reduces.load(), is_linked ? 4 : 0);
    }
}
