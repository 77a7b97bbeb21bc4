#include "ops/decoder_layer/op.hpp"

#include "ops/add/op.hpp"
#include "ops/decoder_layer/cuda.hpp"
#include "ops/embedding/op.hpp"
#include "ops/kv_store/op.hpp"
#include "ops/rms_norm/op.hpp"
#include "ops/rope/op.hpp"
#include "ops/swiglu/op.hpp"

namespace llaisys::ops {

namespace {

// [n, heads * d] as [n, heads, d].
Tensor heads_of(const Tensor &rows, int64_t d) {
    return rows.view({rows.size(0), rows.size(1) / d, d});
}

// norm.normed = the normalised residual stream, with the pending addend applied.
void normalise(const device::Stream &stream, Residual *residual, const Norm &norm) {
    if (!residual->addend.defined()) {
        return rms_norm(stream, norm.normed, residual->sum, norm.weight, norm.epsilon);
    }
    add_rms_norm(stream, norm.normed, residual->sum, residual->addend, norm.weight, norm.epsilon);
    residual->addend = Tensor();
}

// Apply the pending addend for kernels without one. On a device that fuses the addition, only an
// all-reduce leaves an addend.
const Tensor &settled(const device::Stream &stream, Residual *residual) {
    if (residual->addend.defined()) {
        add(stream, residual->sum, residual->sum, residual->addend);
        residual->addend = Tensor();
    }
    return residual->sum;
}

} // namespace

void attention_input(const device::Stream &stream, Residual *residual, const Norm &norm,
                     const LinearPart &q, const LinearPart &k, const LinearPart &v,
                     const HeadNorms &head_norms, const Placement &placement) {
#if defined(LLAISYS_HAVE_CUDA)
    if (stream.type() == LLAISYS_DEVICE_NVIDIA &&
        attention_input_cuda(stream, settled(stream, residual), norm, q, k, v, head_norms,
                             placement)) {
        return;
    }
#endif
    const int64_t d = 2 * placement.inv_freq.size(0);
    const LinearPart parts[] = {q, k, v};
    normalise(stream, residual, norm);
    linear(stream, norm.normed, parts, 3);
    const Tensor queries = heads_of(*q.out, d);
    const Tensor keys = heads_of(*k.out, d);
    const Tensor values = heads_of(*v.out, d);
    const auto norm_heads = [&](const Tensor &heads, const Tensor *weight) {
        if (weight == nullptr) {
            return;
        }
        if (heads.is_contiguous()) {
            const Tensor rows = heads.view({heads.size(0) * heads.size(1), d});
            return rms_norm(stream, rows, rows, *weight, norm.epsilon);
        }
        for (int64_t h = 0; h < heads.size(1); ++h) {
            const Tensor rows = heads.slice(1, h, h + 1).view({heads.size(0), d});
            rms_norm(stream, rows, rows, *weight, norm.epsilon);
        }
    };
    norm_heads(queries, head_norms.q);
    norm_heads(keys, head_norms.k);
    rope_both(stream, queries, keys, placement.positions, placement.inv_freq);
    kv_store(stream, placement.kv, keys, &values, placement.slots);
}

void mlp_input(const device::Stream &stream, Residual *residual, const Norm &norm,
               const LinearPart &gate, const LinearPart &up) {
#if defined(LLAISYS_HAVE_CUDA)
    if (stream.type() == LLAISYS_DEVICE_NVIDIA &&
        mlp_input_cuda(stream, settled(stream, residual), norm, gate, up)) {
        return;
    }
#endif
    const LinearPart parts[] = {gate, up};
    normalise(stream, residual, norm);
    linear(stream, norm.normed, parts, 2);
    swiglu(stream, *gate.out, *gate.out, *up.out);
}

void add_product(const device::Stream &stream, Residual *residual, const Tensor &in,
                 const LinearWeight &weight, const Tensor *bias, const Tensor &scratch) {
#if defined(LLAISYS_HAVE_CUDA)
    if (stream.type() == LLAISYS_DEVICE_NVIDIA) {
        return linear_add(stream, settled(stream, residual), in, weight, bias);
    }
#endif
    const LinearPart part{&weight, bias, &scratch};
    linear(stream, in, &part, 1);
    residual->addend = scratch;
}

void hidden_rows(const device::Stream &stream, const Tensor &out, Residual *residual,
                 const Norm &norm, const Tensor &rows) {
    embedding(stream, out, rows, settled(stream, residual));
    rms_norm(stream, out, out, norm.weight, norm.epsilon);
}

void head(const device::Stream &stream, const Tensor &logits, Residual *residual, const Norm &norm,
          const LinearWeight &weight, const Tensor &rows) {
#if defined(LLAISYS_HAVE_CUDA)
    if (stream.type() == LLAISYS_DEVICE_NVIDIA &&
        head_cuda(stream, logits, settled(stream, residual), norm, weight, rows)) {
        return;
    }
#endif
    const LinearPart part{&weight, nullptr, &logits};
    normalise(stream, residual, norm);
    linear(stream, norm.normed, &part, 1, &rows);
}

} // namespace llaisys::ops
