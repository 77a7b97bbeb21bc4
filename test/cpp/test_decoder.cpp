// The decoder alone: the error of an operator that rejects its input, and pipeline stages.
#include "check.hpp"
#include "models/decoder/decoder.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <thread>

using namespace llaisys;
using namespace llaisys::models;

namespace {

constexpr int kLayers = 3;
using Group = std::shared_ptr<const parallel::ProcessGroup>;

LlaisysDecoderMeta small_meta(int n_layers) {
    LlaisysDecoderMeta meta{};
    meta.dtype = LLAISYS_DTYPE_F32;
    meta.nlayer = size_t(n_layers);
    meta.hs = 8;
    meta.nh = 2;
    meta.nkvh = 1;
    meta.dh = 4;
    meta.di = 6;
    meta.maxseq = 16;
    meta.voc = 11;
    meta.epsilon = 1e-6f;
    meta.theta = 1e4f;
    return meta;
}

// The layers [first, first + count) of a decoder, 4 KV slots and an input of one token. Weights
// are a function of their field and layer.
struct Fixture {
    explicit Fixture(int first = 0, int count = kLayers, Group stages = nullptr)
        : model(LLAISYS_MODEL_TYPE_QWEN2, small_meta(count),
                {LLAISYS_DEVICE_CPU, 0, std::make_shared<parallel::ProcessGroupOne>(), false, false,
                 std::move(stages)}) {
        int seed = 0;
        const auto put = [&](const char *field, const Shape &shape, int layers, int base) {
            ++seed;
            for (int layer = 0; layer < layers; ++layer) {
                auto *weight = new LlaisysTensor(Tensor::create(shape, LLAISYS_DTYPE_F32));
                float *values = weight->tensor.as<float>();
                for (int64_t i = 0; i < weight->tensor.elements(); ++i) {
                    values[i] = float((i * 37 + seed * 11 + (base + layer) * 5) % 23 - 11) / 23;
                }
                model.replace_weight(stream, field, layer, weight);
            }
        };
        put("in_embed", {11, 8}, first == 0 ? 1 : 0, 0);
        put("out_embed", {11, 8}, first + count == kLayers ? 1 : 0, 0);
        put("out_norm_w", {8}, first + count == kLayers ? 1 : 0, 0);
        put("attn_norm_w", {8}, count, first);
        put("attn_q_w", {8, 8}, count, first);
        put("attn_k_w", {4, 8}, count, first);
        put("attn_v_w", {4, 8}, count, first);
        put("attn_o_w", {8, 8}, count, first);
        put("mlp_norm_w", {8}, count, first);
        put("mlp_gate_w", {6, 8}, count, first);
        put("mlp_up_w", {6, 8}, count, first);
        put("mlp_down_w", {8, 6}, count, first);
        model.prepare_weights(stream);
        for (int layer = 0; layer < count; ++layer) {
            kv.push_back(ops::slot_major(Tensor::create({4, 1, 4}, LLAISYS_DTYPE_F32),
                                         Tensor::create({4, 1, 4}, LLAISYS_DTYPE_F32)));
        }
        workspace.reserve(model.workspace_bytes(1, 1));
        const int32_t one = 1;
        lists.q_rows = Tensor::create({1}, LLAISYS_DTYPE_I32);
        lists.begin = Tensor::create({1}, LLAISYS_DTYPE_I32);
        lists.end = Tensor::create({1}, LLAISYS_DTYPE_I32);
        lists.end.load(&one, sizeof one);
        lists.tables = Tensor::create({1, 4}, LLAISYS_DTYPE_I32);
    }
    // Returns the logits.
    std::vector<float> forward() {
        ModelInput input;
        input.n_tokens = 1;
        input.token_ids = Tensor::create({1}, LLAISYS_DTYPE_I64);
        input.positions = Tensor::create({1}, LLAISYS_DTYPE_I64);
        input.output_rows = Tensor::create({1}, LLAISYS_DTYPE_I32);
        const int32_t list_of_layer[kLayers] = {};
        AttentionMetadata attention;
        attention.slots = Tensor::create({1}, LLAISYS_DTYPE_I32);
        attention.lists = &lists;
        attention.list_of_layer = list_of_layer;
        attention.kv = kv.data();
        ForwardOutput output{Tensor::create({1, 11}, LLAISYS_DTYPE_F32), Tensor(), Tensor()};
        workspace.begin();
        model.forward(stream, workspace, input, attention, &output);
        stream.synchronize();
        return {output.logits.as<float>(), output.logits.as<float>() + 11};
    }

    device::Stream stream{LLAISYS_DEVICE_CPU, 0, 1};
    DecoderModel model;
    runtime::Workspace workspace{LLAISYS_DEVICE_CPU, 0};
    std::vector<ops::KvLayer> kv;
    ops::AttentionLists lists;
};

// A group of threads by rank. All have joined before one of them runs: messages of a rank that
// leaves before the next one joins are lost with the memory of the group.
std::vector<std::shared_ptr<parallel::ProcessGroup>> stage_groups(const std::string &init_method,
                                                                  const std::vector<int> &ranks) {
    std::vector<std::shared_ptr<parallel::ProcessGroup>> groups;
    for (int rank : ranks) {
        parallel::GroupOptions options;
        options.name = "stages";
        options.init_method = init_method;
        options.ranks = ranks;
        options.rank = rank;
        groups.push_back(parallel::ProcessGroupFactory::Instance().GetOrCreate("threads", options));
    }
    return groups;
}

} // namespace

TEST(stages_give_the_logits_of_one_model) {
    const std::vector<float> expected = Fixture().forward();
    std::vector<float> found;
    const auto groups = stage_groups("decoder-stages", {0, 1, 2});
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank) {
        threads.emplace_back([&, rank] {
            Fixture stage(2 - rank, 1, groups[size_t(rank)]); // rank 2 is the first stage
            const std::vector<float> logits = stage.forward();
            if (rank == 0) {
                found = logits;
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    CHECK(found == expected);
    CHECK(std::any_of(expected.begin(), expected.end(), [](float v) { return v != 0; }));
}

TEST(failed_stage_ends_the_wait_of_the_next_one) {
    std::string errors[2];
    const auto groups = stage_groups("failing-stages", {0, 1});
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
        threads.emplace_back([&, rank] {
            Fixture stage(rank == 1 ? 0 : 1, rank == 1 ? 1 : 2, groups[size_t(rank)]);
            if (rank == 1) {
                stage.kv[0] = ops::slot_major(Tensor::create({4, 1, 6}, LLAISYS_DTYPE_F32),
                                              Tensor::create({4, 1, 6}, LLAISYS_DTYPE_F32));
            }
            try {
                stage.forward();
            } catch (const Error &error) {
                errors[rank] = error.what();
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    CHECK(errors[1].find("layer 0: kv_store") == 0);
    CHECK(errors[0].find("Recv: group stages, rank 0 of 2, cpu:0: rank 1: layer 0") == 0);
}

TEST(operator_error_names_the_layer) {
    Fixture fixture;
    fixture.forward(); // succeeds
    fixture.kv[2] = ops::slot_major(Tensor::create({4, 1, 6}, LLAISYS_DTYPE_F32),
                                    Tensor::create({4, 1, 6}, LLAISYS_DTYPE_F32));
    CHECK_THROWS(fixture.forward(), "layer 2: kv_store: ", "got shape [1, 1, 4]");
    try {
        fixture.forward();
    } catch (const Error &error) {
        CHECK_EQ(int(error.status()), int(LLAISYS_ERROR_INVALID)); // the operator's status
    }
}
