#include "models/registry.hpp"

#include "models/decoder/decoder.hpp"
#include "models/mock/mock.hpp"

namespace llaisys::models {

namespace {

struct Entry {
    LlaisysModelType type;
    std::unique_ptr<Model> (*create)(const void *meta, DeviceType device, int device_id);
};

const LlaisysQwen2Meta &as_qwen2(const void *meta) {
    return *static_cast<const LlaisysQwen2Meta *>(meta);
}

// A further model type is a further line here.
const Entry kEntries[] = {
    {LLAISYS_MODEL_TYPE_QWEN2,
     [](const void *meta, DeviceType device, int device_id) -> std::unique_ptr<Model> {
         return std::make_unique<DecoderModel>(LLAISYS_MODEL_TYPE_QWEN2, as_qwen2(meta), device,
                                               device_id);
     }},
    {LLAISYS_MODEL_TYPE_LLAMA,
     [](const void *meta, DeviceType device, int device_id) -> std::unique_ptr<Model> {
         return std::make_unique<DecoderModel>(LLAISYS_MODEL_TYPE_LLAMA, as_qwen2(meta), device,
                                               device_id);
     }},
    {LLAISYS_MODEL_TYPE_MOCK,
     [](const void *meta, DeviceType device, int device_id) -> std::unique_ptr<Model> {
         return std::make_unique<MockModel>(as_qwen2(meta), device, device_id);
     }},
};

} // namespace

std::unique_ptr<Model> create_model(LlaisysModelType type, const void *meta, DeviceType device,
                                    int device_id) {
    for (const Entry &entry : kEntries) {
        if (entry.type == type) {
            require(meta != nullptr, "params.meta is NULL");
            return entry.create(meta, device, device_id);
        }
    }
    fail(LLAISYS_ERROR_INVALID, "params.model_type must be qwen2 (1), mock (2) or llama (3), got ",
         int(type));
}

} // namespace llaisys::models
