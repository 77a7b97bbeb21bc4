// The way of an output of attention or of an MLP to the residual stream: summed over the ranks,
// normalised, multiplied by residual_scale and added.
#pragma once

#include "ops/decoder_layer/op.hpp"
#include "parallel/process_group.hpp"

#include "llaisys/models/decoder.h"

namespace llaisys::models {

// weight null: NormKind::none.
ops::Norm norm_of(const LlaisysDecoderMeta &meta, llaisysTensor_t weight, llaisysTensor_t bias,
                  const Tensor &normed);

// The norm after a block, of its output or of the residual stream.
struct PostNorm {
    llaisysTensor_t weight, bias; // null: none
};

class BlockOutput {
public:
    BlockOutput(const LlaisysDecoderMeta &meta, std::shared_ptr<const parallel::ProcessGroup> group)
        : meta_(meta), group_(std::move(group)) {}

    // Whether an output is added as it is, so that a product may add itself.
    bool is_plain(const PostNorm &post_norm) const;

    // residual += in * weight^T + bias. Overwrites scratch with the product.
    void add_product(const device::Stream &stream, ops::Residual *residual, const Tensor &in,
                     const ops::LinearWeight &weight, const Tensor *bias, const PostNorm &post_norm,
                     const Tensor &scratch, const ops::Lora &lora) const;
    // residual += out, this rank's term of the sum; it is overwritten. No product may be pending.
    void add(const device::Stream &stream, ops::Residual *residual, const Tensor &out,
             const PostNorm &post_norm) const;
    // Normalises the residual stream after an output was added, if the model does.
    void finish(const device::Stream &stream, ops::Residual *residual,
                const PostNorm &post_norm) const;

private:
    LlaisysDecoderMeta meta_; // its pointers are not used
    std::shared_ptr<const parallel::ProcessGroup> group_;
};

} // namespace llaisys::models
