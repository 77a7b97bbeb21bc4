#include "ops/decoder_layer/op.hpp"

#include "ops/decoder_layer/cuda.hpp"
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

} // namespace

void attention_input(const device::Stream &stream, const Tensor &residual, const Norm &norm,
                     const LinearPart &q, const LinearPart &k, const LinearPart &v,
                     const HeadNorms &head_norms, const Placement &placement) {
#if defined(LLAISYS_HAVE_CUDA)
    if (stream.type() == LLAISYS_DEVICE_NVIDIA && head_norms.q == nullptr &&
        head_norms.k == nullptr &&
        attention_input_cuda(stream, residual, norm, q, k, v, placement)) {
        return;
    }
#endif
    const int64_t d = 2 * placement.inv_freq.size(0);
    const LinearPart parts[] = {q, k, v};
    rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
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
    rope(stream, queries, queries, placement.positions, placement.inv_freq);
    rope(stream, keys, keys, placement.positions, placement.inv_freq);
    kv_store(stream, placement.kv, keys, &values, placement.slots);
}

void mlp_input(const device::Stream &stream, const Tensor &residual, const Norm &norm,
               const LinearPart &gate, const LinearPart &up) {
#if defined(LLAISYS_HAVE_CUDA)
    if (stream.type() == LLAISYS_DEVICE_NVIDIA &&
        mlp_input_cuda(stream, residual, norm, gate, up)) {
        return;
    }
#endif
    const LinearPart parts[] = {gate, up};
    rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
    linear(stream, norm.normed, parts, 2);
    swiglu(stream, *gate.out, *gate.out, *up.out);
}

void head(const device::Stream &stream, const Tensor &logits, const Tensor &residual,
          const Norm &norm, const LinearWeight &weight, const Tensor &rows) {
#if defined(LLAISYS_HAVE_CUDA)
    if (stream.type() == LLAISYS_DEVICE_NVIDIA &&
        head_cuda(stream, logits, residual, norm, weight, rows)) {
        return;
    }
#endif
    const LinearPart part{&weight, nullptr, &logits};
    rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
    linear(stream, norm.normed, &part, 1, &rows);
}

} // namespace llaisys::ops
