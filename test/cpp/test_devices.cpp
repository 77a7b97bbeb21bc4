// What holds for every device: operators dispatch by the stream's, and nothing takes the memory or
// the stream of another device for the CPU's.
#include "check.hpp"
#include "fake_device.hpp"

#include "device/cpu/cpu_runtime.hpp"
#include "llaisys.h"
#include "ops/attention/op.hpp"
#include "ops/elementwise/op.hpp"
#include "ops/embedding/op.hpp"
#include "ops/glu/op.hpp"
#include "ops/kv_store/op.hpp"
#include "ops/linear/op.hpp"
#include "ops/norm/op.hpp"
#include "ops/rearrange/op.hpp"
#include "ops/rope/op.hpp"
#include "ops/self_attention_masked/op.hpp"
#include "ops/topk/op.hpp"

using namespace llaisys;

namespace {

constexpr DType kF32 = LLAISYS_DTYPE_F32;

Tensor on_fake(const Shape &shape, DType dtype = kF32) {
    return Tensor::create(shape, dtype, LLAISYS_DEVICE_NVIDIA);
}

template <typename Body> void check_unsupported(const char *op, const Body &body) {
    try {
        body();
    } catch (const Error &error) {
        CHECK_EQ(int(error.status()), int(LLAISYS_ERROR_UNSUPPORTED));
        CHECK_EQ(std::string(error.what()), std::string(op) + ": has no kernel for device fake");
        return;
    }
    CHECK(!"an operator ran on a device without kernels");
}

} // namespace

#if !defined(LLAISYS_HAVE_CUDA) // with CUDA there are kernels, which the fake memory is not for
TEST(an_operator_without_a_kernel_for_the_device_says_so) {
    const fake::Device device;
    const device::Stream stream(LLAISYS_DEVICE_NVIDIA, 0, 1);
    const Tensor x = on_fake({2, 4});
    const Tensor heads = on_fake({2, 1, 4});
    const Tensor row = on_fake({4});
    const Tensor ids = on_fake({2}, LLAISYS_DTYPE_I64);
    const Tensor slots = on_fake({2}, LLAISYS_DTYPE_I32);
    const Tensor tables = on_fake({1, 2}, LLAISYS_DTYPE_I32);
    const ops::KvLayer kv = ops::slot_major(heads, heads);
    ops::AttentionLists lists;
    lists.q_rows = lists.begin = lists.end = slots;
    lists.tables = tables;
    check_unsupported("add", [&] { ops::add(stream, x, x, x); });
    check_unsupported("argmax", [&] { ops::argmax(stream, ids, on_fake({2}), x); });
    check_unsupported("attention", [&] { ops::attention(stream, heads, heads, kv, lists, 1.0f); });
    check_unsupported("embedding", [&] { ops::embedding(stream, x, ids, x); });
    check_unsupported("kv_store", [&] { ops::kv_store(stream, kv, heads, &heads, slots); });
    check_unsupported("kv_load", [&] { ops::kv_load(stream, heads, &heads, kv, slots); });
    check_unsupported("linear_weight", [&] { ops::LinearWeight::pack(stream, x); });
    check_unsupported("rearrange", [&] { ops::rearrange(stream, x, x); });
    check_unsupported("rms_norm", [&] { ops::rms_norm(stream, x, x, row, 1e-6f); });
    check_unsupported("add_rms_norm", [&] { ops::add_rms_norm(stream, x, x, x, row, 1e-6f); });
    check_unsupported("rope", [&] { ops::rope(stream, heads, heads, ids, on_fake({2})); });
    check_unsupported("attention", [&] {
        ops::self_attention_masked(stream, heads, heads, heads, heads,
                                   on_fake({2, 2}, LLAISYS_DTYPE_U8), 1.0f);
    });
    check_unsupported("swiglu", [&] { ops::swiglu(stream, x, x, x); });
    check_unsupported("topk", [&] { ops::topk(stream, tables.view({2, 1}), on_fake({2, 1}), x); });
}
#endif

TEST(tensors_of_another_device_are_refused) {
    const fake::Device device;
    const device::Stream stream(LLAISYS_DEVICE_NVIDIA, 0, 1);
    const Tensor here = Tensor::create({2}, kF32);
    CHECK_THROWS(ops::add(stream, here, here, here), "add: out", "expected fake:0");
}

TEST(only_a_stream_of_the_cpu_has_threads) {
    const fake::Device device;
    const device::Stream stream(LLAISYS_DEVICE_NVIDIA, 0, 1);
    CHECK_THROWS(device::pool_of(stream), "device fake", "no threads");

    llaisysStream_t handle = nullptr;
    CHECK_EQ(llaisysStreamCreate(LLAISYS_DEVICE_NVIDIA, 0, 1, &handle), 0);
    int32_t n_threads = 0;
    double value = 0;
    CHECK_EQ(llaisysStreamThreads(handle, &n_threads), int(LLAISYS_ERROR_UNSUPPORTED));
    CHECK_EQ(llaisysBenchProbe(handle, LLAISYS_PROBE_F32, &value), int(LLAISYS_ERROR_UNSUPPORTED));
    CHECK_EQ(llaisysBenchParallelRegion(handle, 1, &value), int(LLAISYS_ERROR_UNSUPPORTED));
    llaisysStreamDestroy(handle);
}
