// The steps of a decoder layer, each as large as a device may want to fuse it. Where it does not,
// they are what they say: a composition of the plain operators.
//
//   attention_input   norm, q/k/v products and biases, norms of heads, rotation, keys and values into the cache
//   attention         ops/attention
//   add_product       output projection, to the residual stream
//   mlp_input         norm, gate and up products, swiglu
//   add_product       down projection, to the residual stream
//   head              the last norm and the product with the vocabulary, for chosen rows
//   hidden_rows       the last norm alone, for chosen rows; before head, if at all
#pragma once

#include "ops/kv_layer.hpp"
#include "ops/linear/op.hpp"

namespace llaisys::ops {

// The residual stream. A product may still be waiting to be added to it: where a device does not add
// it with the product itself, the next norm does, in one pass over the rows.
struct Residual {
    Tensor sum;    // f32 [n, hs]
    Tensor addend; // real [n, hs]; not defined: nothing waits
};

// How a row of the residual stream is normalised before a product.
struct Norm {
    const Tensor &weight; // [hs] real
    float epsilon;
    const Tensor &normed; // scratch [n, hs], of the dtype that products want, may be the addend;
                          // undefined afterwards
};

// The positions that keys and queries are rotated to and where keys and values go.
struct Placement {
    const Tensor &positions; // i64 [n]
    const Tensor &inv_freq;  // f32 [d / 2]
    const Tensor &slots;     // i32 [n]
    const KvLayer &kv;
};

// RMS norms of each query and key head before it is rotated (Qwen3), [d] each; null: none. The
// epsilon is that of the layer's norm.
struct HeadNorms {
    const Tensor *q;
    const Tensor *k;
};

// q, k, v: their outputs are [n, heads * d], rows may be apart; afterwards q holds the rotated
// queries and k and v are undefined.
void attention_input(const device::Stream &stream, Residual *residual, const Norm &norm,
                     const LinearPart &q, const LinearPart &k, const LinearPart &v,
                     const HeadNorms &head_norms, const Placement &placement);

// gate.out = up * silu(gate) of the normalised rows; up.out is undefined afterwards. No biases.
void mlp_input(const device::Stream &stream, Residual *residual, const Norm &norm,
               const LinearPart &gate, const LinearPart &up);

// residual += in * weight^T + bias; bias null: none. scratch: real [n, hs], where the product waits for
// the next norm. Nothing else may be waiting.
void add_product(const device::Stream &stream, Residual *residual, const Tensor &in,
                 const LinearWeight &weight, const Tensor *bias, const Tensor &scratch);

// out f32 [h, hs]: the normalised rows (i64 [h]) of the residual stream, with which head goes on as if
// nothing had been. norm.normed is left alone.
void hidden_rows(const device::Stream &stream, const Tensor &out, Residual *residual,
                 const Norm &norm, const Tensor &rows);

// logits f32 [r, voc] of rows (i32 [r]) of the residual stream.
void head(const device::Stream &stream, const Tensor &logits, Residual *residual, const Norm &norm,
          const LinearWeight &weight, const Tensor &rows);

} // namespace llaisys::ops
