// The parts of a decoder layer, each as large as a device may fuse it. Without fusion they are
// compositions of the plain operators.
//
//   attention_input   norm, q/k/v products and biases, QK norms, RoPE, KV store
//   attention         ops/attention
//   add_product       output projection, to the residual stream
//   mlp_input         norm, gate and up products, activation
//   add_product       down projection, to the residual stream
//   head              final norm and vocabulary product, for selected rows
//   hidden_rows       final norm only, for selected rows; before head, if used
#pragma once

#include "ops/glu/op.hpp"
#include "ops/kv_layer.hpp"
#include "ops/linear/op.hpp"
#include "ops/lora/op.hpp"

#include <initializer_list>

namespace llaisys::ops {

// The residual stream. A product may be pending: where a device does not add it in the product's
// epilogue, the next norm adds it in one pass over the rows.
struct Residual {
    Tensor sum;    // f32 [n, hs]
    Tensor addend; // real [n, hs]; undefined: nothing is pending
    PendingLora lora = {};
};

enum class NormKind { rms, layer, none };

// Norm of a residual row before a product.
struct Norm {
    const Tensor &weight; // [hs] real; not used by NormKind::none
    float epsilon;
    const Tensor &normed; // scratch [n, hs] in the dtype of the products, may be the addend;
                          // undefined afterwards
    NormKind kind = NormKind::rms;
    const Tensor *bias = nullptr; // [hs] real, of a layer norm; null: none
};

// Positions of the rotary embedding and slots of the KV store.
struct Placement {
    const Tensor &positions; // i64 [n]
    const Tensor &inv_freq;  // f32 [d / 2]
    const Tensor &slots;     // i32 [n]
    const KvLayer &kv;
    float rope_factor = 1.0f; // see ops::rope
};

// QK norms: RMS norms of each query and key head before RoPE (Qwen3), [d] each, or of all heads of
// a token together (OLMo 2), [heads * d]; null: none. They use the epsilon of the layer's norm.
struct HeadNorms {
    const Tensor *q;
    const Tensor *k;
};

// LoRA adapters of the products of one call, in the order of its parts.
struct Lora {
    const LoraRows *rows = nullptr; // null: none
    const LoraWeight *weights[kMaxLoraParts] = {};
    int n_parts = 0;
    const Tensor *scratch = nullptr; // of lora()
    const Tensor *terms = nullptr;   // f32, of a pending product; as large as its scratch
    // mlp_input: the adapters of the product that reads its result and is the next one added to the
    // residual stream, as it is; null: none.
    const LoraWeight *next = nullptr;
};

// outs += the adapters' products of `in`. Does nothing without adapters.
void apply_lora(const device::Stream &stream, const Lora &lora, const Tensor &in,
                std::initializer_list<const Tensor *> outs);

// q, k, v: their outputs are [n, heads * d] with any row stride; afterwards q holds the rotated
// queries, and k and v are undefined.
void attention_input(const device::Stream &stream, Residual *residual, const Norm &norm,
                     const LinearPart &q, const LinearPart &k, const LinearPart &v,
                     const HeadNorms &head_norms, const Placement &placement,
                     const Lora &lora = {});

// gate.out = up * activation(gate) of the normalised rows; up.out is undefined afterwards. An MLP
// without a gate has no up.weight (null): gate.out = activation(gate).
void mlp_input(const device::Stream &stream, Residual *residual, const Norm &norm,
               const LinearPart &gate, const LinearPart &up,
               Activation activation = Activation::silu, const Lora &lora = {});

// Adds the pending products to the sum; returns the sum.
const Tensor &settle(const device::Stream &stream, Residual *residual);
// Adds the pending LoRA product only.
void settle_lora(const device::Stream &stream, Residual *residual);

// out = norm(in); norm.normed is not used.
void norm_rows(const device::Stream &stream, const Tensor &out, const Tensor &in, const Norm &norm);

// residual += in * weight^T + bias; bias null: none. scratch: real [n, hs] for a pending product.
// No other product may be pending.
void add_product(const device::Stream &stream, Residual *residual, const Tensor &in,
                 const LinearWeight &weight, const Tensor *bias, const Tensor &scratch,
                 const Lora &lora = {});

// out f32 [h, hs]: the normalised rows (i64 [h]) of the residual stream. The residual and
// norm.normed are unchanged.
void hidden_rows(const device::Stream &stream, const Tensor &out, Residual *residual,
                 const Norm &norm, const Tensor &rows);

// logits f32 [r, voc] of rows (i32 [r]) of the residual stream.
void head(const device::Stream &stream, const Tensor &logits, Residual *residual, const Norm &norm,
          const LinearWeight &weight, const Tensor &rows);

} // namespace llaisys::ops
