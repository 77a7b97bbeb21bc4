// Base of models whose weights come from the slots of a public struct, Weights.
#pragma once

#include "models/model.hpp"
#include "runtime/weights/packed_weights.hpp"

namespace llaisys::models {

// A derived class adds its slots to table_ and packed_. Slots must be members of weights_ or owned
// by the table, because both outlive the members of a derived class.
template <typename Weights> class SlotModel : public Model {
public:
    void *weights() final { return &weights_; }
    void replace_weight(const device::Stream &stream, const char *field, int layer,
                        llaisysTensor_t handle) final {
        packed_.replace(stream, field, layer, handle);
    }
    void prepare_weights(const device::Stream &stream) final { packed_.prepare(stream); }
    uint64_t weights_version() const final { return packed_.version(); }

protected:
    SlotModel(ModelSpec spec, const ModelPlacement &placement)
        : Model(std::move(spec)), table_(placement.device, placement.device_id), packed_(table_) {}

    // Activations are f32 on the CPU and have the weights' dtype elsewhere.
    DType activation_dtype(DType of_weights) const {
        return table_.device() == LLAISYS_DEVICE_CPU ? LLAISYS_DTYPE_F32 : of_weights;
    }

    Weights weights_{};
    runtime::WeightTable table_;
    runtime::PackedWeights packed_;
};

} // namespace llaisys::models
