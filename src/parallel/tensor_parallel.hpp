// Tensor-parallel linear layers: each rank holds one shard of the weight (names of 002 section
// 3.2.3). The decoder has its own buffers and uses the two functions; the classes allocate their
// outputs and are built on the functions.
#pragma once

#include "ops/linear/op.hpp"
#include "parallel/process_group.hpp"

#include <vector>

namespace llaisys::parallel {

// Row-parallel product: out = in * weight^T, in [n, local in], weight [out, local in]. Rank 0 adds
// the bias (null: none). Sums over the ranks unless reduce_output is false.
void row_parallel_linear(const device::Stream &stream, const ProcessGroup &group,
                         const tensor_t &out, const tensor_t &in, const ops::LinearWeight &weight,
                         const tensor_t *bias, bool reduce_output = true);

// Gathers the outputs of a column-parallel product: out [n, columns] from local [n, width] of each
// rank, where rank r has the columns from r * width on; the last rank may use fewer. gathered
// [ranks, n, width] is scratch.
void gather_columns(const device::Stream &stream, const ProcessGroup &group, const tensor_t &out,
                    const tensor_t &local, const tensor_t &gathered);

// Base class: the group, the weight shard and the bias.
class ParallelLinear {
public:
    // Packs this rank's shard of the weight and stores that of the bias (null: none). The layer
    // runs on the stream, which must outlive it.
    void Load(const device::Stream &stream, const tensor_t &weight, const tensor_t *bias);

protected:
    // group: null for the default one.
    ParallelLinear(bool skip_bias_add, bool sequence_parallel,
                   std::shared_ptr<const ProcessGroup> group);

    void set_shape(int64_t local_out, int64_t local_in, bool has_bias);
    // `features` per rank; throws when they are not divisible.
    int64_t shard_size(const char *name, int64_t features) const;
    tensor_t create(const Shape &shape) const; // f32 on the device of the stream
    const ops::LinearWeight &weight() const { return weight_; }
    // The bias to add; null: none, or skipped.
    const tensor_t *added_bias() const {
        return !skip_bias_add_ && bias_.defined() ? &bias_ : nullptr;
    }
    // {output}, or {output, bias} with skip_bias_add.
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
    tensor_t bias_; // without storage: none
};

// Sharded by output: weight [out_features / ranks, in_features] and its bias. Every rank passes the
// whole input; `input_is_parallel` has no effect.
class ColumnParallelLinear : public ParallelLinear {
public:
    // group: null for the default one. Throws when out_features is not divisible by the number of
    // ranks, and for sequence_parallel, which is not supported.
    ColumnParallelLinear(int64_t in_features, int64_t out_features, bool bias, bool gather_output,
                         bool input_is_parallel, bool skip_bias_add, bool sequence_parallel = false,
                         std::shared_ptr<const ProcessGroup> group = nullptr);

    // {[n, in_features]} -> {[n, out_features / ranks]}, or {[n, out_features]} when gathered.
    std::vector<tensor_t> Forward(const std::vector<tensor_t> &input_tensors);

private:
    int64_t in_features_, local_out_;
    bool gather_output_;
};

// Sharded by input: weight [out_features, in_features / ranks]. Every rank holds the whole bias;
// rank 0 adds it.
class RowParallelLinear : public ParallelLinear {
public:
    RowParallelLinear(int64_t in_features, int64_t out_features, bool bias, bool reduce_output,
                      bool input_is_parallel, bool skip_bias_add, bool sequence_parallel = false,
                      std::shared_ptr<const ProcessGroup> group = nullptr);

    // {[n, in_features / ranks]} when the input is parallel, else {[n, in_features]}, of which a
    // rank reads its columns -> {[n, out_features]}: the sum, or this rank's term without
    // reduce_output.
    std::vector<tensor_t> Forward(const std::vector<tensor_t> &input_tensors);

private:
    int64_t out_features_, local_in_;
    bool reduce_output_;
    bool input_is_parallel_;
};

} // namespace llaisys::parallel
