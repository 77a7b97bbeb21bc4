// The model types.
#include "models/decoder/decoder.hpp"
#include "models/draft_head/draft_head.hpp"
#include "models/mock/mock.hpp"

namespace llaisys::models {

std::unique_ptr<Model> create_model(LlaisysModelType type, const void *meta,
                                    const ModelPlacement &placement) {
    const auto *decoder = static_cast<const LlaisysDecoderMeta *>(meta);
    if (type <= LLAISYS_MODEL_TYPE_UNKNOWN || type > LLAISYS_MODEL_TYPE_DRAFT_HEAD) {
        fail(LLAISYS_ERROR_INVALID,
             "params.model_type must be qwen2 (1), mock (2), llama (3), qwen3 (4), decoder (5) or "
             "draft_head (6), got ",
             int(type));
    }
    require(meta != nullptr, "params.meta is NULL");
    if (type != LLAISYS_MODEL_TYPE_MOCK && type != LLAISYS_MODEL_TYPE_DRAFT_HEAD) {
        return std::make_unique<DecoderModel>(type, *decoder, placement);
    }
    if (placement.stages) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "params.pipeline_parallel_size must be 0 or 1 for ",
             "this model type, got ", placement.stages->size() / placement.group->size());
    }
    if (type == LLAISYS_MODEL_TYPE_MOCK) {
        return std::make_unique<MockModel>(*decoder, placement);
    }
    return std::make_unique<DraftHead>(*static_cast<const LlaisysDraftHeadMeta *>(meta), placement);
}

} // namespace llaisys::models
