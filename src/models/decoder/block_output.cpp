#include "models/decoder/block_output.hpp"

#include "models/hyper_params.hpp"
#include "ops/elementwise/op.hpp"
#include "parallel/tensor_parallel.hpp"
#include "tensor/handle.hpp"

namespace llaisys::models {

ops::Norm norm_of(const LlaisysDecoderMeta &meta, llaisysTensor_t weight, llaisysTensor_t bias,
                  const Tensor &normed) {
    static const Tensor no_weight;
    if (weight == nullptr) {
        return {no_weight, meta.epsilon, normed, ops::NormKind::none};
    }
    const bool is_rms = meta.norm_kind == LLAISYS_NORM_RMS;
    return {weight->tensor, meta.epsilon, normed,
            is_rms ? ops::NormKind::rms : ops::NormKind::layer,
            bias != nullptr ? &bias->tensor : nullptr};
}

bool BlockOutput::is_plain(const PostNorm &post_norm) const {
    const bool norms_output =
        post_norm.weight != nullptr && meta_.norm_position != LLAISYS_NORM_RESIDUAL;
    return group_->size() == 1 && !norms_output && or_one(meta_.residual_scale) == 1.0f;
}

void BlockOutput::add_product(const device::Stream &stream, ops::Residual *residual,
                              const Tensor &in, const ops::LinearWeight &weight, const Tensor *bias,
                              const PostNorm &post_norm, const Tensor &scratch,
                              const ops::Lora &lora) const {
    if (is_plain(post_norm)) {
        ops::add_product(stream, residual, in, weight, bias, scratch, lora);
        return finish(stream, residual, post_norm);
    }
    ops::settle(stream, residual);
    parallel::row_parallel_linear(stream, *group_, scratch, in, weight, bias, false);
    ops::apply_lora(stream, lora, in, {&scratch}); // A x is this rank's term of a sum
    add(stream, residual, scratch, post_norm);
}

void BlockOutput::add(const device::Stream &stream, ops::Residual *residual, const Tensor &out,
                      const PostNorm &post_norm) const {
    const bool norms_output =
        post_norm.weight != nullptr && meta_.norm_position != LLAISYS_NORM_RESIDUAL;
    const float scale = or_one(meta_.residual_scale);
    if (group_->size() > 1) {
        if (!norms_output && scale == 1.0f && group_->AllReduceAdd(residual->sum, out)) {
            return finish(stream, residual, post_norm);
        }
        group_->AllReduce(out);
    }
    if (norms_output) {
        ops::norm_rows(stream, out, out, norm_of(meta_, post_norm.weight, post_norm.bias, out));
    }
    if (scale != 1.0f) {
        ops::scale(stream, out, out, scale);
    }
    residual->addend = out;
    finish(stream, residual, post_norm);
}

void BlockOutput::finish(const device::Stream &stream, ops::Residual *residual,
                         const PostNorm &post_norm) const {
    if (meta_.norm_position == LLAISYS_NORM_RESIDUAL) {
        const Tensor &sum = ops::settle(stream, residual);
        ops::norm_rows(stream, sum, sum, norm_of(meta_, post_norm.weight, post_norm.bias, sum));
    }
}

} // namespace llaisys::models
