// The decoder alone: the error of an operator that rejects its input.
#include "check.hpp"
#include "models/decoder/decoder.hpp"

using namespace llaisys;
using namespace llaisys::models;

namespace {

constexpr int kLayers = 3;

LlaisysDecoderMeta small_meta() {
    LlaisysDecoderMeta meta{};
    meta.dtype = LLAISYS_DTYPE_F32;
    meta.nlayer = kLayers;
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

// A decoder with zero weights, 4 KV slots and an input of one token.
struct Fixture {
    Fixture() {
        const auto put = [&](const char *field, const Shape &shape, int layers) {
            for (int layer = 0; layer < layers; ++layer) {
                model.replace_weight(stream, field, layer,
                                     new LlaisysTensor(Tensor::create(shape, LLAISYS_DTYPE_F32)));
            }
        };
        put("in_embed", {11, 8}, 1);
        put("out_embed", {11, 8}, 1);
        put("out_norm_w", {8}, 1);
        put("attn_norm_w", {8}, kLayers);
        put("attn_q_w", {8, 8}, kLayers);
        put("attn_k_w", {4, 8}, kLayers);
        put("attn_v_w", {4, 8}, kLayers);
        put("attn_o_w", {8, 8}, kLayers);
        put("mlp_norm_w", {8}, kLayers);
        put("mlp_gate_w", {6, 8}, kLayers);
        put("mlp_up_w", {6, 8}, kLayers);
        put("mlp_down_w", {8, 6}, kLayers);
        model.prepare_weights(stream);
        for (int layer = 0; layer < kLayers; ++layer) {
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
    void forward() {
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
    }

    device::Stream stream{LLAISYS_DEVICE_CPU, 0, 1};
    DecoderModel model{{LLAISYS_MODEL_TYPE_QWEN2},
                       small_meta(),
                       {LLAISYS_DEVICE_CPU, 0, std::make_shared<parallel::ProcessGroupOne>()}};
    runtime::Workspace workspace{LLAISYS_DEVICE_CPU, 0};
    std::vector<ops::KvLayer> kv;
    ops::AttentionLists lists;
};

} // namespace

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
