// A model whose weights are packed out of the slots of a public struct, Weights.
#pragma once

#include "models/model.hpp"
#include "runtime/weights/packed_weights.hpp"

namespace llaisys::models {

// What derives from it adds its slots to table_ and packed_; all of them lie in weights_ or are the
// table's own, since they outlive everything that a derived class has.
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
    SlotModel(ModelSpec spec, const ModelSite &site)
        : Model(std::move(spec)), table_(site.device, site.device_id), packed_(table_) {}

    Weights weights_{};
    runtime::WeightTable table_;
    runtime::PackedWeights packed_;
};

} // namespace llaisys::models
