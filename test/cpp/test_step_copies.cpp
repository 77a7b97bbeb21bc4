// Upload of step inputs, with tokens sampled by the previous step.
#include "check.hpp"
#include "ops/step_copies/op.hpp"

#include <vector>

using namespace llaisys;

namespace {

const device::Stream &stream() {
    static const device::Stream made(LLAISYS_DEVICE_CPU, 0, 1);
    return made;
}

// 16 values: the first 3 are tokens, those from the 9th on their sources.
struct Arena {
    std::shared_ptr<Storage> memory = std::make_shared<Storage>(LLAISYS_DEVICE_CPU, 0, 128);
    ops::SampledTokens sampled{Tensor::on(memory, 0, {3}, LLAISYS_DTYPE_I64),
                               Tensor::on(memory, 64, {3}, LLAISYS_DTYPE_I32),
                               Tensor::create({2}, LLAISYS_DTYPE_I64)};
};

} // namespace

TEST(sampled_tokens_replace_tokens_with_a_source) {
    Arena arena;
    arena.sampled.sampled.as<int64_t>()[0] = 70;
    arena.sampled.sampled.as<int64_t>()[1] = 71;
    std::vector<int64_t> host(16, 5);
    auto *sources = reinterpret_cast<int32_t *>(host.data() + 8);
    sources[0] = 1;
    sources[1] = -1;
    sources[2] = 0;
    const auto *from = reinterpret_cast<const std::byte *>(host.data());
    ops::bring_in(stream(), arena.memory->data(), from, 128, &arena.sampled);
    const auto *tokens = arena.sampled.tokens.as<int64_t>();
    CHECK_EQ(tokens[0], 71);
    CHECK_EQ(tokens[1], 5);
    CHECK_EQ(tokens[2], 70);
    CHECK_EQ(tokens[3], 5); // the rest is uploaded unchanged
    std::vector<int64_t> back(16);
    ops::bring_out(stream(), reinterpret_cast<std::byte *>(back.data()), arena.memory->data(), 128);
    CHECK_EQ(back[0], 71);
    CHECK_EQ(back[15], 5);
}

TEST(upload_in_place_only_replaces_sampled_tokens) {
    Arena arena;
    arena.sampled.sampled.as<int64_t>()[1] = 9;
    for (int i = 0; i < 3; ++i) {
        arena.sampled.sources.as<int32_t>()[i] = i == 2 ? 1 : -1;
    }
    ops::bring_in(stream(), arena.memory->data(), arena.memory->data(), 128, &arena.sampled);
    CHECK_EQ(arena.sampled.tokens.as<int64_t>()[2], 9);
    CHECK_EQ(arena.sampled.tokens.as<int64_t>()[1], 0);
}

TEST(unaligned_sizes_and_foreign_memory_are_rejected) {
    Arena arena;
    std::vector<int64_t> host(16);
    const auto *from = reinterpret_cast<const std::byte *>(host.data());
    std::byte *to = arena.memory->data();
    CHECK_THROWS(ops::bring_in(stream(), to, from, 24), "bring_in", "bytes", "24", "16");
    CHECK_THROWS(ops::bring_out(stream(), to + 8, from, 16), "bring_out", "multiples of 16");
    CHECK_THROWS(ops::bring_in(stream(), to, from, 64, &arena.sampled), "sources", "elsewhere");
    arena.sampled.tokens = Tensor::create({3}, LLAISYS_DTYPE_I64);
    CHECK_THROWS(ops::bring_in(stream(), to, from, 128, &arena.sampled), "tokens", "elsewhere");
    arena.sampled.tokens = Tensor::create({2}, LLAISYS_DTYPE_I64);
    CHECK_THROWS(ops::bring_in(stream(), to, from, 128, &arena.sampled), "sources");
}
