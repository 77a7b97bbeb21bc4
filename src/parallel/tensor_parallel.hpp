// Linear layers of which each rank of a group holds a part (the names of 002 section 3.2.3).
//
// A layer is made with the sizes of the whole, given its rank's part of the weight, and then run. The
// decoder, which has its own buffers and runs several products as one, does by hand what Forward does
// here: a product, then one AllReduce where parts of a sum have to come together.
#pragma once

#include "ops/linear/op.hpp"
#include "parallel/process_group.hpp"

#include <vector>

namespace llaisys::parallel {

// Common to both: the group, the weight, and what to do with the bias.
class ParallelLinear {
public:
    // This rank's part of the weight, of the layer's local shape, and of the bias where there is one
    // (null otherwise). Laid out on the stream, which the layer runs on from then on and which must
    // outlive it.
    void Load(const device::Stream &stream, const tensor_t &weight, const tensor_t *bias);

protected:
    // group: null for the default one.
    ParallelLinear(bool skip_bias_add, bool sequence_parallel,
                   std::shared_ptr<const ProcessGroup> group);

    void set_shape(int64_t local_out, int64_t local_in, bool has_bias);
    // `features` of one rank; throws when they cannot be divided.
    int64_t share_of(const char *name, int64_t features) const;
    // input [n, local in] -> [n, local out]; with the bias when `adds_bias` and it is not skipped.
    tensor_t product(const tensor_t &input, bool adds_bias) const;
    // {output}, or {output, bias} when the bias is left to the caller.
    std::vector<tensor_t> results(const tensor_t &output) const;
    const tensor_t &only_input(const std::vector<tensor_t> &inputs, int64_t columns) const;

    const ProcessGroup &group() const { return *group_; }
    const device::Stream &stream() const { return *stream_; }

private:
    std::shared_ptr<const ProcessGroup> group_;
    Shape local_shape_{0, 0}; // [out, in]
    bool has_bias_ = false;
    bool skip_bias_add_;
    const device::Stream *stream_ = nullptr;
    ops::LinearWeight weight_;
    tensor_t bias_; // not defined when there is none
};

// Outputs are cut: weight [out_features / ranks, in_features] and its bias. Every rank passes the
// whole input; `input_is_parallel` says that it is there already, which it always is.
class ColumnParallelLinear : public ParallelLinear {
public:
    // group: null for the default one. Throws when out_features cannot be divided, and for
    // sequence_parallel, which is not there.
    ColumnParallelLinear(int64_t in_features, int64_t out_features, bool bias, bool gather_output,
                         bool input_is_parallel, bool skip_bias_add, bool sequence_parallel = false,
                         std::shared_ptr<const ProcessGroup> group = nullptr);

    // {[n, in_features]} -> {[n, out_features / ranks]}, or {[n, out_features]} when gathered.
    std::vector<tensor_t> Forward(const std::vector<tensor_t> &input_tensors);

private:
    int64_t in_features_;
    bool gather_output_;
};

// Inputs are cut: weight [out_features, in_features / ranks]; the bias is whole on every rank and one
// term of the sum.
class RowParallelLinear : public ParallelLinear {
public:
    RowParallelLinear(int64_t in_features, int64_t out_features, bool bias, bool reduce_output,
                      bool input_is_parallel, bool skip_bias_add, bool sequence_parallel = false,
                      std::shared_ptr<const ProcessGroup> group = nullptr);

    // {[n, in_features / ranks]} when the input is parallel, else {[n, in_features]} of which a rank
    // takes its columns -> {[n, out_features]}: the sum, or this rank's part of it.
    std::vector<tensor_t> Forward(const std::vector<tensor_t> &input_tensors);

private:
    int64_t local_in_;
    bool reduce_output_;
    bool input_is_parallel_;
};

} // namespace llaisys::parallel
