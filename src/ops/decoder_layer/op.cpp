#include "ops/decoder_layer/op.hpp"

#include "ops/decoder_layer/cuda.hpp"
#include "ops/elementwise/op.hpp"
#include "ops/embedding/op.hpp"
#include "ops/kv_store/op.hpp"
#include "ops/norm/op.hpp"
#include "ops/rope/op.hpp"

namespace llaisys::ops {

namespace {

// [n, heads * d] as [n, heads, d].
Tensor heads_of(const Tensor &rows, int64_t d) {
    return rows.view({rows.size(0), rows.size(1) / d, d});
}

// norm.normed = the normalised residual stream, with the pending addend applied.
void normalise(const device::Stream &stream, Residual *residual, const Norm &norm) {
    settle_lora(stream, residual);
    if (norm.kind != NormKind::rms || !residual->addend.defined()) {
        return norm_rows(stream, norm.normed, settle(stream, residual), norm);
    }
    add_rms_norm(stream, norm.normed, residual->sum, residual->addend, norm.weight, norm.epsilon);
    residual->addend = Tensor();
}

// RMS norms of the heads [n, heads, d] of q or k in place. weight: [d] or [heads * d]; null: none.
void norm_heads(const device::Stream &stream, const Tensor &rows, int64_t d, const Tensor *weight,
                float epsilon) {
    if (weight == nullptr) {
        return;
    }
    if (weight->size(0) == rows.size(1)) { // all heads together
        return rms_norm(stream, rows, rows, *weight, epsilon);
    }
    const Tensor heads = heads_of(rows, d);
    if (heads.is_contiguous()) {
        const Tensor all = heads.view({heads.size(0) * heads.size(1), d});
        return rms_norm(stream, all, all, *weight, epsilon);
    }
    for (int64_t h = 0; h < heads.size(1); ++h) {
        const Tensor one = heads.slice(1, h, h + 1).view({heads.size(0), d});
        rms_norm(stream, one, one, *weight, epsilon);
    }
}

} // namespace

void settle_lora(const device::Stream &stream, Residual *residual) {
    add_pending_lora(stream, residual->sum, residual->lora);
    residual->lora = {};
}

// On a device that fuses the addition, only an all-reduce or a post norm leaves an addend.
const Tensor &settle(const device::Stream &stream, Residual *residual) {
    settle_lora(stream, residual);
    if (residual->addend.defined()) {
        add(stream, residual->sum, residual->sum, residual->addend);
        residual->addend = Tensor();
    }
    return residual->sum;
}

void norm_rows(const device::Stream &stream, const Tensor &out, const Tensor &in,
               const Norm &norm) {
    switch (norm.kind) {
    case NormKind::rms:
        return rms_norm(stream, out, in, norm.weight, norm.epsilon);
    case NormKind::layer:
        return layer_norm(stream, out, in, norm.weight, norm.bias, norm.epsilon);
    case NormKind::none:
        return scale(stream, out, in, 1.0f);
    }
}

void apply_lora(const device::Stream &stream, const Lora &adapters, const Tensor &in,
                std::initializer_list<const Tensor *> outs) {
    if (adapters.rows == nullptr) {
        return;
    }
    ensure(int(outs.size()) == adapters.n_parts, "lora: ", outs.size(), " products, ",
           adapters.n_parts, " adapters");
    LoraPart parts[kMaxLoraParts];
    for (int p = 0; p < adapters.n_parts; ++p) {
        parts[p] = {adapters.weights[p], outs.begin()[p]};
    }
    lora(stream, in, parts, adapters.n_parts, *adapters.rows, *adapters.scratch);
}

void attention_input(const device::Stream &stream, Residual *residual, const Norm &norm,
                     const LinearPart &q, const LinearPart &k, const LinearPart &v,
                     const HeadNorms &head_norms, const Placement &placement,
                     const Lora &adapters) {
#if defined(LLAISYS_HAVE_CUDA)
    if (stream.type() == LLAISYS_DEVICE_NVIDIA &&
        attention_input_cuda(stream, residual, norm, q, k, v, head_norms, placement, adapters)) {
        return;
    }
#endif
    const int64_t d = 2 * placement.inv_freq.size(0);
    const LinearPart parts[] = {q, k, v};
    normalise(stream, residual, norm);
    linear(stream, norm.normed, parts, 3);
    apply_lora(stream, adapters, norm.normed, {q.out, k.out, v.out});
    norm_heads(stream, *q.out, d, head_norms.q, norm.epsilon);
    norm_heads(stream, *k.out, d, head_norms.k, norm.epsilon);
    const Tensor queries = heads_of(*q.out, d);
    const Tensor keys = heads_of(*k.out, d);
    const Tensor values = heads_of(*v.out, d);
    rope_both(stream, queries, keys, placement.positions, placement.inv_freq,
              placement.rope_factor);
    kv_store(stream, placement.kv, keys, &values, placement.slots);
}

void mlp_input(const device::Stream &stream, Residual *residual, const Norm &norm,
               const LinearPart &gate, const LinearPart &up, Activation activation,
               const Lora &adapters) {
#if defined(LLAISYS_HAVE_CUDA)
    if (stream.type() == LLAISYS_DEVICE_NVIDIA && activation == Activation::silu &&
        up.weight != nullptr && gate.bias == nullptr && up.bias == nullptr &&
        mlp_input_cuda(stream, residual, norm, gate, up, adapters)) {
        return;
    }
#endif
    const LinearPart parts[] = {gate, up};
    normalise(stream, residual, norm);
    const bool is_gated = up.weight != nullptr;
    linear(stream, norm.normed, parts, is_gated ? 2 : 1);
    if (is_gated) {
        apply_lora(stream, adapters, norm.normed, {gate.out, up.out});
    } else {
        apply_lora(stream, adapters, norm.normed, {gate.out});
    }
    glu(stream, *gate.out, *gate.out, is_gated ? up.out : nullptr, activation);
}

void add_product(const device::Stream &stream, Residual *residual, const Tensor &in,
                 const LinearWeight &weight, const Tensor *bias, const Tensor &scratch,
                 const Lora &adapters) {
#if defined(LLAISYS_HAVE_CUDA)
    if (stream.type() == LLAISYS_DEVICE_NVIDIA) {
        if (adapters.rows != nullptr && residual->lora.weight == adapters.weights[0]) {
            return linear_add(stream, residual->sum, in, weight, bias); // t is pending already
        }
        linear_add(stream, settle(stream, residual), in, weight, bias);
        if (adapters.rows == nullptr ||
            lora_shrink_cuda(stream, in, *adapters.weights[0], *adapters.rows, *adapters.terms,
                             &residual->lora)) {
            return;
        }
        return apply_lora(stream, adapters, in, {&residual->sum});
    }
#endif
    const LinearPart part{&weight, bias, &scratch};
    linear(stream, in, &part, 1);
    apply_lora(stream, adapters, in, {&scratch});
    residual->addend = scratch;
}

void hidden_rows(const device::Stream &stream, const Tensor &out, Residual *residual,
                 const Norm &norm, const Tensor &rows) {
    embedding(stream, out, rows, settle(stream, residual));
    norm_rows(stream, out, out, norm);
}

void head(const device::Stream &stream, const Tensor &logits, Residual *residual, const Norm &norm,
          const LinearWeight &weight, const Tensor &rows) {
#if defined(LLAISYS_HAVE_CUDA)
    if (stream.type() == LLAISYS_DEVICE_NVIDIA &&
        head_cuda(stream, logits, settle(stream, residual), norm, weight, rows)) {
        return;
    }
#endif
    const LinearPart part{&weight, nullptr, &logits};
    normalise(stream, residual, norm);
    linear(stream, norm.normed, &part, 1, &rows);
}

} // namespace llaisys::ops
