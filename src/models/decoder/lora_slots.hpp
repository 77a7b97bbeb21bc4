// LoRA adapters of a decoder: slots with A and B for the linear weights of every layer. See
// llaisysModelReserveLora.
#pragma once

#include "ops/decoder_layer/op.hpp"
#include "runtime/workspace/workspace.hpp"

#include <array>
#include <vector>

namespace llaisys::models {

// Linear weights of a layer that an adapter may change.
enum class LoraTarget { q, k, v, o, gate, up, down };
constexpr int kLoraTargets = 7;

// Shape of one target, of this rank; the same for every layer.
struct LoraShape {
    const char *field;                 // name of the weight slot
    int64_t out_features, in_features; // out_features 0: the model has no such weight
};
using LoraShapes = std::array<LoraShape, kLoraTargets>; // by LoraTarget

// The adapters of a forward's rows.
struct LoraInput {
    const ops::LoraRows *rows = nullptr; // null: none
    Tensor scratch;                      // f32, of ops::lora
    Tensor terms;                        // f32, of a pending product
};

class LoraSlots {
public:
    LoraSlots() = default;
    // stream null: for allocate() alone, without memory.
    LoraSlots(const device::Stream *stream, const LoraShapes &shapes, int64_t n_layers, DType dtype,
              int64_t n_slots, int64_t max_rank);
    static int64_t bytes_of(const LoraShapes &shapes, int64_t n_layers, DType dtype,
                            int64_t n_slots, int64_t max_rank);

    int64_t n_slots() const { return n_slots_; }
    int64_t max_rank() const { return max_rank_; }
    // [n_slots]: the largest rank of each slot in any product; 0: empty.
    const int32_t *ranks() const { return ranks_.data(); }
    // Scratch of any product of n rows; nothing without slots.
    LoraInput allocate(runtime::Workspace &workspace, int64_t n) const;

    // See llaisysModelSetLora and llaisysModelClearLora.
    void set(const device::Stream &stream, int64_t slot, const char *field, int64_t layer,
             const Tensor &a, const Tensor &b, float scale);
    void clear(const device::Stream &stream, int64_t slot);

    const ops::LoraWeight &weight(size_t layer, LoraTarget target) const {
        return layers_[layer][size_t(target)];
    }
    // The adapters of products over one input, which must outlive the result.
    ops::Lora product(size_t layer, std::initializer_list<LoraTarget> targets,
                      const LoraInput &input) const;

private:
    int64_t scratch_of(int64_t m, int64_t parts, LoraTarget target) const;

    using Layer = std::array<ops::LoraWeight, kLoraTargets>;
    LoraShapes shapes_{};
    std::vector<Layer> layers_;
    std::vector<int32_t> ranks_;
    int64_t n_slots_ = 0;
    int64_t max_rank_ = 0;
};

} // namespace llaisys::models
