// Unit tests of workspace, output buffer, graph runner and captured steps.
#include "check.hpp"
#include "fake_device.hpp"
#include "ops/rearrange/op.hpp"
#include "runtime/graph/captured_steps.hpp"
#include "runtime/graph/graph.hpp"
#include "runtime/output/output_buffer.hpp"
#include "runtime/workspace/workspace.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>

using namespace llaisys;
using namespace llaisys::runtime;

// Counts every allocation of the program. Not inlined: GCC would warn about free() after `new`.
static std::atomic<int64_t> n_allocations{0};

[[gnu::noinline]] void *operator new(size_t bytes) {
    ++n_allocations;
    if (void *memory = std::malloc(bytes == 0 ? 1 : bytes)) {
        return memory;
    }
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void *memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void *memory, size_t) noexcept { std::free(memory); }

namespace {

int64_t two_per_token(const GraphParams &params) { return params.n_tokens * 128; }

} // namespace

// -- Workspace ---------------------------------------------------------------------------------

TEST(workspace_addresses_are_stable_aligned_and_disjoint) {
    Workspace workspace(LLAISYS_DEVICE_CPU, 0);
    const Shape shapes[] = {{3, 7}, {1}, {0, 4}, {16}, {5, 5, 5}};
    int64_t bytes = 0;
    for (const Shape &shape : shapes) {
        bytes += Workspace::aligned(bytes_of(LLAISYS_DTYPE_BF16, shape.elements()));
    }
    workspace.reserve(bytes);
    CHECK_EQ(workspace.capacity(), bytes);
    std::vector<std::byte *> first;
    for (int round = 0; round < 3; ++round) {
        workspace.begin();
        std::byte *end = nullptr;
        for (size_t i = 0; i < 5; ++i) {
            const Tensor tensor = workspace.allocate(shapes[i], LLAISYS_DTYPE_BF16);
            CHECK(tensor.is_contiguous() && tensor.shape() == shapes[i]);
            CHECK_EQ(reinterpret_cast<uintptr_t>(tensor.data()) % 64, 0u);
            CHECK(end == nullptr || tensor.data() >= end);
            end = tensor.data() + tensor.bytes();
            std::memset(tensor.data(), 0xff, size_t(tensor.bytes()));
            if (round == 0) {
                first.push_back(tensor.data());
            }
            CHECK(tensor.data() == first[i]);
        }
        workspace.reserve(bytes / 2); // large enough: nothing moves
        CHECK_EQ(workspace.allocations(), 1);
    }
    CHECK_THROWS(workspace.allocate({1}, LLAISYS_DTYPE_F32), "workspace", "64 are needed");
}

TEST(workspace_only_grows_and_old_tensors_stay_valid) {
    Workspace workspace(LLAISYS_DEVICE_CPU, 0);
    CHECK_EQ(workspace.capacity(), 0);
    CHECK_THROWS(workspace.allocate({1}, LLAISYS_DTYPE_F32), "workspace of 0 bytes");
    workspace.reserve(256);
    const Tensor old = workspace.allocate({64}, LLAISYS_DTYPE_F32);
    old.as<float>()[63] = 7;
    workspace.reserve(1024);
    CHECK_EQ(workspace.allocations(), 2);
    CHECK_EQ(workspace.capacity(), 1024);
    const Tensor fresh = workspace.allocate({256}, LLAISYS_DTYPE_F32); // all of the new arena
    CHECK(fresh.storage() != old.storage());
    CHECK_EQ(old.as<float>()[63], 7.0f);
    workspace.reserve(0);
    CHECK_EQ(workspace.capacity(), 1024);
    CHECK_EQ(workspace.allocations(), 2);
}

TEST(measuring_workspace_counts_without_memory) {
    Workspace workspace = Workspace::measuring();
    const Tensor x = workspace.allocate({3, 7}, LLAISYS_DTYPE_F32);
    CHECK(!x.defined() && x.shape() == Shape({3, 7}) && x.dtype() == LLAISYS_DTYPE_F32);
    workspace.allocate({1}, LLAISYS_DTYPE_F16);
    CHECK_EQ(workspace.used(), 128 + 64);
    CHECK_EQ(workspace.capacity(), 0);
}

TEST(workspace_sizes_are_rounded_to_its_alignment) {
    CHECK_EQ(Workspace::aligned(0), 0);
    CHECK_EQ(Workspace::aligned(4), 64);
    CHECK_EQ(Workspace::aligned(64), 64);
    CHECK_EQ(Workspace::aligned(68), 128);
}

// -- Output rows -------------------------------------------------------------------------------

TEST(output_rows_are_appended_in_order_and_cleared) {
    const device::Stream stream(LLAISYS_DEVICE_CPU, 0, 1);
    OutputBuffer output(LLAISYS_DEVICE_CPU, 0, 3);
    CHECK_EQ(output.n_rows(), 0);
    CHECK(output.host_rows(stream) == nullptr);
    output.reserve(4);
    const int32_t ids[] = {2, 5, 9};
    const Tensor head = output.append(ids, 2);
    const Tensor tail = output.append(ids + 2, 1);
    CHECK(head.shape() == Shape({2, 3}) && tail.shape() == Shape({1, 3}));
    CHECK(tail.as<float>() == head.as<float>() + 6);
    CHECK(output.host_rows(stream) == head.as<float>()); // no copy on the CPU
    CHECK(output.rows().shape() == Shape({3, 3}) && output.rows().data() == head.data());
    CHECK_EQ(output.n_rows(), 3);
    CHECK_EQ(output.ids()[2], 9);
    CHECK_THROWS(output.append(ids, 2), "4 rows", "5 are needed");
    CHECK_EQ(output.n_rows(), 3);
    output.clear();
    CHECK_EQ(output.n_rows(), 0);
    CHECK(output.host_rows(stream) == nullptr);
    CHECK(output.append(ids, 1).as<float>() == head.as<float>()); // the same memory
}

TEST(step_without_output_rows_has_an_empty_tensor) {
    OutputBuffer output(LLAISYS_DEVICE_CPU, 0, 3);
    output.reserve(0); // the first step may have none
    const Tensor none = output.append(nullptr, 0);
    CHECK(none.shape() == Shape({0, 3}) && none.defined());
    output.reserve(1);
    const int32_t id = 0;
    output.append(&id, 1);
    CHECK_EQ(output.append(nullptr, 0).elements(), 0);
    CHECK_EQ(output.n_rows(), 1);
}

TEST(output_reserve_grows_only) {
    OutputBuffer output(LLAISYS_DEVICE_CPU, 0, 8);
    output.reserve(10);
    CHECK_EQ(output.capacity(), 10);
    const int32_t ids[10] = {};
    const float *address = output.append(ids, 10).as<float>();
    output.clear();
    output.reserve(3);
    CHECK_EQ(output.capacity(), 10);
    CHECK(output.append(ids, 3).as<float>() == address);
    output.reserve(11); // rows are lost
    CHECK_EQ(output.n_rows(), 0);
    CHECK_EQ(output.capacity(), 11);
    CHECK_THROWS(output.reserve(std::numeric_limits<int64_t>::max()), "too many elements");
}

TEST(device_rows_are_copied_to_the_host_once_per_step) {
    const fake::Device device;
    const device::Stream stream(LLAISYS_DEVICE_NVIDIA, 0, 1);
    OutputBuffer output(LLAISYS_DEVICE_NVIDIA, 0, 2);
    output.reserve(3);
    const int32_t ids[] = {0, 1, 2};
    for (int step = 0; step < 2; ++step) {
        output.clear();
        const Tensor rows = output.append(ids, 2);
        std::fill(rows.as<float>(), rows.as<float>() + 4, float(step + 1));
        const float *host = output.host_rows(stream);
        CHECK(host != rows.as<float>() && host[3] == float(step + 1));
        CHECK(output.host_rows(stream) == host);
        CHECK_EQ(fake::copies().device_to_host, step + 1);
    }
    output.append(ids + 2, 1).as<float>()[0] = 7; // a further micro-batch of the step
    CHECK_EQ(output.host_rows(stream)[4], 7.0f);
    CHECK_EQ(fake::copies().device_to_host, 3);
    CHECK_EQ(fake::copies().without_stream, 0);
}

// -- Graph -------------------------------------------------------------------------------------

TEST(graph_allocates_only_for_a_larger_step) {
    Workspace workspace(LLAISYS_DEVICE_CPU, 0);
    GraphRunner graph(workspace, two_per_token);
    CHECK(!graph.can_reuse({1, 0}));
    graph.reserve({4, 1});
    graph.reserve({2, 1}); // fits
    CHECK_EQ(workspace.allocations(), 1);
    CHECK_EQ(workspace.capacity(), 4 * 128);
    CHECK(graph.can_reuse({4, 1}) && !graph.can_reuse({5, 1}));
    int runs = 0;
    for (const int64_t n : {1, 4, 3, 5, 4, 5}) {
        graph.run({n, 1}, [&] {
            ++runs;
            for (int64_t i = 0; i < 2 * n; ++i) { // the workspace is empty and large enough
                workspace.allocate({16}, LLAISYS_DTYPE_F32);
            }
        });
    }
    CHECK_EQ(runs, 6);
    CHECK_EQ(workspace.allocations(), 2);
}

TEST(graph_is_usable_after_an_exception) {
    Workspace workspace(LLAISYS_DEVICE_CPU, 0);
    GraphRunner graph(workspace, two_per_token);
    CHECK_THROWS(graph.run({2, 0}, [&] { fail(LLAISYS_ERROR_INTERNAL, "in the body"); }), "body");
    graph.run({2, 0}, [&] { workspace.allocate({64}, LLAISYS_DTYPE_F32); });
    CHECK_EQ(workspace.allocations(), 1);
}

// The hot path: views, workspace, output rows, graph and passing checks.
TEST(repeated_step_allocates_nothing) {
    const device::Stream stream(LLAISYS_DEVICE_CPU, 0, 1);
    Workspace workspace(LLAISYS_DEVICE_CPU, 0);
    GraphRunner graph(workspace, two_per_token);
    OutputBuffer output(LLAISYS_DEVICE_CPU, 0, 6);
    const int32_t ids[] = {0, 1};
    const int order[] = {1, 0, 2};
    const auto step = [&] {
        output.clear();
        output.reserve(2);
        const Tensor rows = output.append(ids, 2);
        graph.run({4, 2}, [&] {
            const Tensor x = workspace.allocate({4, 6}, LLAISYS_DTYPE_F32);
            // Six dimensions: the text of such a shape would need an allocation.
            CHECK_EQ(x.view({1, 4, 1, 3, 2, 1}).elements(), 24);
            const Tensor heads = x.view({4, 3, 2}).slice(1, 1, 3);
            const Tensor transposed = heads.permute(order).slice(0, 0, 1).view({4, 2});
            CHECK(transposed.has_dense_rows() &&
                  ops::contiguous(stream, x.slice(0, 1, 2)).defined());
            ops::rearrange(stream, rows.slice(1, 0, 2), transposed.slice(0, 0, 2));
        });
    };
    step();
    const int64_t before = n_allocations;
    for (int i = 0; i < 100; ++i) {
        step();
    }
    CHECK_EQ(n_allocations - before, 0);
    CHECK(before > 0);
}

// -- Captured steps ----------------------------------------------------------------------------

namespace {

bool may_tune = true; // autotuning state of the stream of the test below

} // namespace

TEST(autotuning_runs_only_before_a_capture_and_on_request) {
    device::Runtime table = device::cpu_runtime();
    table.allow_trials = [](void *, bool are_allowed) { may_tune = are_allowed; };
    table.begin_capture = [](void *) {};
    table.end_capture = [](void *) -> void * { return &may_tune; };
    table.launch_graph = [](void *, void *) {};
    table.destroy_graph = [](void *) {};
    device::use_runtime(LLAISYS_DEVICE_CPU, &table);
    {
        const device::Stream stream(LLAISYS_DEVICE_CPU, 0, 1);
        CapturedSteps steps(stream);
        CHECK(!may_tune); // no autotuning in an ordinary step
        std::vector<bool> seen;
        const auto body = [&] { seen.push_back(may_tune); };
        steps.run({8, 0, false, false}, 1, body);
        steps.run({8, 0, false, false}, 1, body); // replayed
        CHECK(seen == std::vector<bool>({true, false}));
        CHECK(!may_tune);
        steps.run_autotuning(body);
        CHECK(seen.size() == 3 && seen.back() && !may_tune && steps.count() == 1);
        CHECK_THROWS(
            steps.run({16, 0, false, false}, 1, [&] { fail(LLAISYS_ERROR_INTERNAL, "lost"); }),
            "lost");
        CHECK(!may_tune);
    }
    device::use_runtime(LLAISYS_DEVICE_CPU, nullptr);
}
