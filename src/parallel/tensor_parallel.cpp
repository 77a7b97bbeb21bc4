#include "parallel/tensor_parallel.hpp"

#include "ops/rearrange/op.hpp"

#include <algorithm>

namespace llaisys::parallel {

void row_parallel_linear(const device::Stream &stream, const ProcessGroup &group,
                         const tensor_t &out, const tensor_t &in, const ops::LinearWeight &weight,
                         const tensor_t *bias, bool reduce_output) {
    const ops::LinearPart part{&weight, group.rank() == 0 ? bias : nullptr, &out};
    ops::linear(stream, in, &part, 1);
    if (reduce_output) {
        group.AllReduce(out);
    }
}

void gather_columns(const device::Stream &stream, const ProcessGroup &group, const tensor_t &out,
                    const tensor_t &local, const tensor_t &gathered) {
    group.AllGather(gathered, local);
    const int64_t width = local.size(1);
    for (int64_t rank = 0; rank < group.size(); ++rank) {
        const int64_t begin = rank * width;
        const int64_t end = std::min(begin + width, out.size(1));
        const tensor_t part = gathered.slice(0, rank, rank + 1).view(local.shape());
        ops::rearrange(stream, out.slice(1, begin, end), part.slice(1, 0, end - begin));
    }
}

ParallelLinear::ParallelLinear(bool skip_bias_add, bool sequence_parallel,
                               std::shared_ptr<const ProcessGroup> group)
    : group_(group ? std::move(group) : ProcessGroupFactory::Instance().GetDefaultProcessGroup()),
      skip_bias_add_(skip_bias_add) {
    if (sequence_parallel) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "sequence_parallel is not supported");
    }
}

void ParallelLinear::set_shape(int64_t local_out, int64_t local_in, bool has_bias) {
    local_shape_ = {local_out, local_in};
    has_bias_ = has_bias;
}

int64_t ParallelLinear::shard_size(const char *name, int64_t features) const {
    require(features >= 1 && features % group_->size() == 0, name,
            " must be divisible by the number of ranks, ", group_->size(), ", got ", features);
    return features / group_->size();
}

void ParallelLinear::Load(const device::Stream &stream, const tensor_t &weight,
                          const tensor_t *bias) {
    require(weight.shape() == local_shape_, "weight: rank ", group_->rank(), " of ", group_->size(),
            " holds ", local_shape_, ", got ", weight.shape());
    require((bias != nullptr) == has_bias_, "bias: got ", bias != nullptr ? "one" : "none",
            ", expected ", has_bias_ ? "one" : "none");
    require(bias == nullptr || bias->shape() == Shape{local_shape_[0]}, "bias: rank ",
            group_->rank(), " of ", group_->size(), " holds ", Shape{local_shape_[0]}, ", got ",
            bias != nullptr ? bias->shape() : Shape{});
    stream_ = &stream;
    weight_ = ops::LinearWeight::pack(stream, weight);
    bias_ = bias != nullptr ? *bias : tensor_t();
}

tensor_t ParallelLinear::create(const Shape &shape) const {
    return Tensor::create(shape, LLAISYS_DTYPE_F32, stream_->type(), stream_->device_id());
}

std::vector<tensor_t> ParallelLinear::results(const tensor_t &output) const {
    return skip_bias_add_ && bias_.defined() ? std::vector<tensor_t>{output, bias_}
                                             : std::vector<tensor_t>{output};
}

const tensor_t &ParallelLinear::only_input(const std::vector<tensor_t> &inputs,
                                           int64_t columns) const {
    require(stream_ != nullptr, "Forward before Load");
    require(inputs.size() == 1, "input_tensors must be one tensor, got ", inputs.size());
    const tensor_t &input = inputs.front();
    require(input.ndim() == 2 && input.size(1) == columns, "input_tensors[0] must be [n, ", columns,
            "], got ", input.shape());
    return input;
}

ColumnParallelLinear::ColumnParallelLinear(int64_t in_features, int64_t out_features, bool bias,
                                           bool gather_output, bool, bool skip_bias_add,
                                           bool sequence_parallel,
                                           std::shared_ptr<const ProcessGroup> group)
    : ParallelLinear(skip_bias_add, sequence_parallel, std::move(group)), in_features_(in_features),
      local_out_(shard_size("out_features", out_features)), gather_output_(gather_output) {
    set_shape(local_out_, in_features, bias);
}

std::vector<tensor_t> ColumnParallelLinear::Forward(const std::vector<tensor_t> &input_tensors) {
    const tensor_t &input = only_input(input_tensors, in_features_);
    const int64_t n = input.size(0);
    const tensor_t local = create({n, local_out_});
    const ops::LinearPart part{&weight(), added_bias(), &local};
    ops::linear(stream(), input, &part, 1);
    if (!gather_output_ || group().size() == 1) {
        return results(local);
    }
    const int64_t ranks = group().size();
    const tensor_t output = create({n, ranks * local_out_});
    gather_columns(stream(), group(), output, local, create({ranks, n, local_out_}));
    return results(output);
}

RowParallelLinear::RowParallelLinear(int64_t in_features, int64_t out_features, bool bias,
                                     bool reduce_output, bool input_is_parallel, bool skip_bias_add,
                                     bool sequence_parallel,
                                     std::shared_ptr<const ProcessGroup> group)
    : ParallelLinear(skip_bias_add, sequence_parallel, std::move(group)),
      out_features_(out_features), local_in_(shard_size("in_features", in_features)),
      reduce_output_(reduce_output), input_is_parallel_(input_is_parallel) {
    set_shape(out_features, local_in_, bias);
}

std::vector<tensor_t> RowParallelLinear::Forward(const std::vector<tensor_t> &input_tensors) {
    const int64_t columns = input_is_parallel_ ? local_in_ : local_in_ * group().size();
    const tensor_t &input = only_input(input_tensors, columns);
    const int64_t first = input_is_parallel_ ? 0 : local_in_ * group().rank();
    const tensor_t output = create({input.size(0), out_features_});
    row_parallel_linear(stream(), group(), output, input.slice(1, first, first + local_in_),
                        weight(), added_bias(), reduce_output_);
    return results(output);
}

} // namespace llaisys::parallel
