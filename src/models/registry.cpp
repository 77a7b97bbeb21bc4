#include "models/registry.hpp"

#include "models/decoder/decoder.hpp"
#include "models/draft_head/draft_head.hpp"
#include "models/mock/mock.hpp"

namespace llaisys::models {

namespace {

struct Entry {
    LlaisysModelType type;
    std::unique_ptr<Model> (*create)(const void *meta, const ModelPlacement &placement);
    bool has_stages = true; // supports pipeline stages
};

const LlaisysDecoderMeta &as_decoder(const void *meta) {
    return *static_cast<const LlaisysDecoderMeta *>(meta);
}

template <LlaisysModelType type, bool needs_head_norms = false>
std::unique_ptr<Model> create_decoder(const void *meta, const ModelPlacement &placement) {
    return std::make_unique<DecoderModel>(DecoderKind{type, needs_head_norms}, as_decoder(meta),
                                          placement);
}

// A model class with its own forward adds an entry here.
const Entry kEntries[] = {
    {LLAISYS_MODEL_TYPE_QWEN2, create_decoder<LLAISYS_MODEL_TYPE_QWEN2>},
    {LLAISYS_MODEL_TYPE_LLAMA, create_decoder<LLAISYS_MODEL_TYPE_LLAMA>},
    {LLAISYS_MODEL_TYPE_QWEN3, create_decoder<LLAISYS_MODEL_TYPE_QWEN3, true>},
    {LLAISYS_MODEL_TYPE_DECODER, create_decoder<LLAISYS_MODEL_TYPE_DECODER>},
    {LLAISYS_MODEL_TYPE_MOCK,
     [](const void *meta, const ModelPlacement &placement) -> std::unique_ptr<Model> {
         return std::make_unique<MockModel>(as_decoder(meta), placement);
     },
     false},
    {LLAISYS_MODEL_TYPE_DRAFT_HEAD,
     [](const void *meta, const ModelPlacement &placement) -> std::unique_ptr<Model> {
         return std::make_unique<DraftHead>(*static_cast<const LlaisysDraftHeadMeta *>(meta),
                                            placement);
     },
     false},
};

} // namespace

std::unique_ptr<Model> create_model(LlaisysModelType type, const void *meta,
                                    const ModelPlacement &placement) {
    for (const Entry &entry : kEntries) {
        if (entry.type == type) {
            require(meta != nullptr, "params.meta is NULL");
            if (placement.stages && !entry.has_stages) {
                fail(LLAISYS_ERROR_UNSUPPORTED, "params.pipeline_parallel_size must be 0 or 1 for ",
                     "this model type, got ", placement.stages->size() / placement.group->size());
            }
            return entry.create(meta, placement);
        }
    }
    fail(LLAISYS_ERROR_INVALID,
         "params.model_type must be qwen2 (1), mock (2), llama (3), qwen3 (4), decoder (5) or "
         "draft_head (6), got ",
         int(type));
}

} // namespace llaisys::models
