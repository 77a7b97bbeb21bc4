// llaisysModelScratchBytes and llaisysModelLoraBytes against what a model allocates.
#include "check.hpp"
#include "fake_device.hpp"
#include "llaisys.h"

#include <algorithm>
#include <numeric>

using namespace llaisys;

namespace {

constexpr int32_t kTokens = 24;

LlaisysDecoderMeta small_meta(DType dtype) {
    LlaisysDecoderMeta meta{};
    meta.dtype = dtype;
    meta.nlayer = 3;
    meta.hs = 24;
    meta.nh = 4;
    meta.nkvh = 2;
    meta.dh = 6;
    meta.di = 50;
    meta.maxseq = 40;
    meta.voc = 37;
    meta.epsilon = 1e-6f;
    meta.theta = 1e4f;
    return meta;
}

LlaisysDecoderMeta expert_meta() {
    LlaisysDecoderMeta meta = small_meta(LLAISYS_DTYPE_BF16);
    meta.n_experts = 5;
    meta.n_experts_used = 2;
    meta.moe_di = 14;
    meta.shared_di = 10;
    return meta;
}

LlaisysModelCreateParams params_of(const void *meta, LlaisysModelType type) {
    LlaisysModelCreateParams params{};
    params.struct_size = sizeof params;
    params.model_type = type;
    params.meta = meta;
    params.n_threads = 1;
    params.max_batch_tokens = kTokens;
    return params;
}

int64_t scratch_of(const LlaisysModelCreateParams &params, int32_t n_outputs, int32_t max_loras,
                   int32_t max_rank) {
    int64_t bytes = 0;
    CHECK_EQ(llaisysModelScratchBytes(&params, n_outputs, max_loras, max_rank, &bytes), 0);
    return bytes;
}

bool has(const std::vector<int64_t> &sizes, int64_t size) {
    return std::count(sizes.begin(), sizes.end(), size) > 0;
}

void check_model(const LlaisysModelCreateParams &params, int64_t vocabulary, bool has_lora) {
    fake::CountedAllocations allocations;
    const int64_t rows = kTokens * vocabulary * int64_t(sizeof(float));
    const int64_t workspace = scratch_of(params, 0, 0, 0) - rows;
    CHECK_EQ(scratch_of(params, kTokens + 5, 0, 0), workspace + rows / kTokens * (kTokens + 5));
    allocations.take();
    LlaisysModel *model = llaisysModelCreate(&params);
    CHECK(model != nullptr);
    const std::vector<int64_t> sizes = allocations.take();
    CHECK(has(sizes, workspace));
    CHECK(has(sizes, rows));
    int64_t slots = 0;
    const bool is_known = llaisysModelLoraBytes(&params, 3, 20, &slots) == LLAISYS_OK;
    CHECK_EQ(is_known, has_lora);
    if (has_lora) {
        const int64_t larger = scratch_of(params, 0, 3, 20) - rows;
        CHECK(larger > workspace);
        allocations.take();
        CHECK_EQ(llaisysModelReserveLora(model, 3, 20), 0);
        const std::vector<int64_t> more = allocations.take();
        CHECK_EQ(std::accumulate(more.begin(), more.end(), int64_t(0)), slots + larger);
    }
    llaisysModelDestroy(model);
}

} // namespace

TEST(scratch_bytes_are_what_a_model_allocates) {
    for (const DType dtype : {LLAISYS_DTYPE_F32, LLAISYS_DTYPE_BF16}) {
        const LlaisysDecoderMeta meta = small_meta(dtype);
        check_model(params_of(&meta, LLAISYS_MODEL_TYPE_DECODER), 37, true);
    }
    const LlaisysDecoderMeta experts = expert_meta();
    check_model(params_of(&experts, LLAISYS_MODEL_TYPE_DECODER), 37, true);
    for (const int32_t kind :
         {LLAISYS_DRAFT_HEAD_EAGLE, LLAISYS_DRAFT_HEAD_EAGLE3, LLAISYS_DRAFT_HEAD_MTP}) {
        LlaisysDraftHeadMeta head{};
        head.decoder = small_meta(LLAISYS_DTYPE_BF16);
        head.decoder.nlayer = 1;
        head.in_voc = 37;
        head.n_features = kind == LLAISYS_DRAFT_HEAD_EAGLE3 ? 3 : 1;
        head.kind = kind;
        check_model(params_of(&head, LLAISYS_MODEL_TYPE_DRAFT_HEAD), 37, false);
    }
}

TEST(memory_of_a_rank_needs_no_device_and_no_other_rank) {
    const LlaisysDecoderMeta meta = expert_meta();
    LlaisysModelCreateParams params = params_of(&meta, LLAISYS_MODEL_TYPE_DECODER);
    params.device = LLAISYS_DEVICE_NVIDIA;
    const int64_t alone = scratch_of(params, 0, 2, 8);
    params.tensor_parallel_size = params.world_size = 2;
    params.rank = 1;
    params.vocab_parallel_head = 1;
    CHECK(scratch_of(params, 0, 2, 8) < alone);
    params.pipeline_parallel_size = 2;
    params.world_size = 4;
    params.rank = 2; // not the last stage: no logits
    CHECK(scratch_of(params, 0, 2, 8) < alone - kTokens * 36 * int64_t(sizeof(float)));
    params.rank = 4;
    int64_t bytes = 0;
    CHECK_EQ(llaisysModelScratchBytes(&params, 0, 0, 0, &bytes), int(LLAISYS_ERROR_INVALID));
    CHECK_EQ(llaisysModelScratchBytes(nullptr, 0, 0, 0, &bytes), int(LLAISYS_ERROR_INVALID));
}
