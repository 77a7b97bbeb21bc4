#include "capi/guard.hpp"
#include "ops/add/op.hpp"
#include "ops/argmax/op.hpp"
#include "ops/attention/op.hpp"
#include "ops/embedding/op.hpp"
#include "ops/geglu/op.hpp"
#include "ops/kv_store/op.hpp"
#include "ops/layer_norm/op.hpp"
#include "ops/moe/op.hpp"
#include "ops/quantise/op.hpp"
#include "ops/rearrange/op.hpp"
#include "ops/rms_norm/op.hpp"
#include "ops/rope/op.hpp"
#include "ops/scale/op.hpp"
#include "ops/self_attention_masked/op.hpp"
#include "ops/softmax/op.hpp"
#include "ops/swiglu/op.hpp"
#include "ops/topk/op.hpp"

#include <vector>

using namespace llaisys;
using namespace llaisys::capi;

namespace {

// NULL: the CPU with the calling thread only.
const device::Stream &stream_of(llaisysStream_t stream) {
    if (stream != nullptr) {
        return stream->stream;
    }
    thread_local const device::Stream alone(LLAISYS_DEVICE_CPU, 0, 1);
    return alone;
}

constexpr int32_t kMaxParts = 64;

} // namespace

int32_t llaisysAdd(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t a,
                   llaisysTensor_t b) {
    return guard([&] {
        ops::add(stream_of(stream), tensor_of(out, "add: out"), tensor_of(a, "add: a"),
                 tensor_of(b, "add: b"));
    });
}

int32_t llaisysArgmax(llaisysStream_t stream, llaisysTensor_t max_index, llaisysTensor_t max_value,
                      llaisysTensor_t values) {
    return guard([&] {
        ops::argmax(stream_of(stream), tensor_of(max_index, "argmax: max_index"),
                    tensor_of(max_value, "argmax: max_value"), tensor_of(values, "argmax: values"));
    });
}

int32_t llaisysEmbedding(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t index,
                         llaisysTensor_t table) {
    return guard([&] {
        ops::embedding(stream_of(stream), tensor_of(out, "embedding: out"),
                       tensor_of(index, "embedding: index"), tensor_of(table, "embedding: table"));
    });
}

int32_t llaisysLinearWeightCreate(llaisysStream_t stream, llaisysTensor_t tensor,
                                  llaisysLinearWeight_t *weight) {
    return guard([&] {
        *not_null(weight, "weight") = nullptr;
        *weight = new LlaisysLinearWeight{
            ops::LinearWeight::pack(stream_of(stream), tensor_of(tensor, "linear: tensor"))};
    });
}

void llaisysLinearWeightDestroy(llaisysLinearWeight_t weight) { delete weight; }

int32_t llaisysLinearWeightBytes(llaisysDataType_t dtype, int64_t out_features, int64_t in_features,
                                 int64_t *bytes) {
    return guard([&] {
        *not_null(bytes, "bytes") =
            ops::LinearWeight::bytes_on_cpu(dtype, out_features, in_features);
    });
}

int32_t llaisysLinear(llaisysStream_t stream, llaisysTensor_t in, llaisysTensor_t rows, int32_t n,
                      const llaisysLinearWeight_t *weight, const llaisysTensor_t *bias,
                      const llaisysTensor_t *out) {
    return guard([&] {
        require(n >= 1 && n <= kMaxParts, "linear: n must be in [1, ", kMaxParts, "], got ", n);
        not_null(weight, "linear: weight");
        not_null(out, "linear: out");
        ops::LinearPart parts[kMaxParts];
        for (int32_t i = 0; i < n; ++i) {
            parts[i].weight = &not_null(weight[i], "linear: weight")->weight;
            parts[i].bias = bias != nullptr && bias[i] != nullptr
                                ? &tensor_of(bias[i], "linear: bias")
                                : nullptr;
            parts[i].out = &tensor_of(out[i], "linear: out");
        }
        ops::linear(stream_of(stream), tensor_of(in, "linear: in"), parts, n,
                    rows != nullptr ? &tensor_of(rows, "linear: rows") : nullptr);
    });
}

int32_t llaisysMoeRoute(llaisysStream_t stream, llaisysTensor_t experts, llaisysTensor_t weights,
                        llaisysTensor_t logits, llaisysTensor_t bias, int32_t is_sigmoid,
                        int32_t is_renormalised, int32_t n_groups, int32_t n_top_groups,
                        float scale) {
    return guard([&] {
        const ops::MoeRouting routing{is_sigmoid != 0, is_renormalised != 0, n_groups, n_top_groups,
                                      scale};
        ops::moe_route(stream_of(stream), tensor_of(experts, "moe_route: experts"),
                       tensor_of(weights, "moe_route: weights"),
                       tensor_of(logits, "moe_route: logits"),
                       bias != nullptr ? &tensor_of(bias, "moe_route: bias") : nullptr, routing);
    });
}

int32_t llaisysMoeMlp(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t in,
                      llaisysTensor_t experts, llaisysTensor_t weights, llaisysTensor_t gate,
                      llaisysTensor_t up, llaisysTensor_t down, llaisysTensor_t gate_bias,
                      llaisysTensor_t up_bias, llaisysTensor_t down_bias, int32_t n_experts,
                      float limit, float alpha) {
    return guard([&] {
        const device::Stream &on = stream_of(stream);
        const auto pack = [&](llaisysTensor_t tensor, const char *name) {
            return ops::ExpertWeights::pack(on, tensor_of(tensor, name), n_experts);
        };
        const auto bias = [](llaisysTensor_t tensor, const char *name) {
            return tensor != nullptr ? &tensor_of(tensor, name) : nullptr;
        };
        const Tensor &ids = tensor_of(experts, "moe_mlp: experts");
        const Tensor &rows = tensor_of(in, "moe_mlp: in");
        const ops::ExpertWeights packed[] = {pack(gate, "moe_mlp: gate"), pack(up, "moe_mlp: up"),
                                             pack(down, "moe_mlp: down")};
        const ops::ExpertMlp mlp{&packed[0],
                                 &packed[1],
                                 &packed[2],
                                 bias(gate_bias, "moe_mlp: gate_bias"),
                                 bias(up_bias, "moe_mlp: up_bias"),
                                 bias(down_bias, "moe_mlp: down_bias"),
                                 limit,
                                 alpha};
        const bool is_cpu = on.type() == LLAISYS_DEVICE_CPU;
        const DType dtype = is_cpu ? LLAISYS_DTYPE_F32 : packed[0].all.bytes.dtype();
        const auto create = [&](const Shape &shape, DType type) {
            return Tensor::create(shape, type, on.type(), on.device_id());
        };
        const int64_t pairs = ids.elements();
        const ops::MoeBuffers buffers{
            create({pairs, packed[0].out_features}, dtype),
            is_cpu ? create({pairs, packed[0].out_features}, dtype) : Tensor(),
            create({pairs, packed[2].out_features}, dtype),
            is_cpu ? Tensor()
                   : create({ops::moe_sorted_size(pairs, n_experts)}, LLAISYS_DTYPE_I32)};
        ops::moe_mlp(on, tensor_of(out, "moe_mlp: out"), false, rows, ids,
                     tensor_of(weights, "moe_mlp: weights"), mlp, buffers);
        on.synchronize(); // the buffers are freed
    });
}

int32_t llaisysRmsNorm(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t in,
                       llaisysTensor_t weight, float epsilon) {
    return guard([&] {
        ops::rms_norm(stream_of(stream), tensor_of(out, "rms_norm: out"),
                      tensor_of(in, "rms_norm: in"), tensor_of(weight, "rms_norm: weight"),
                      epsilon);
    });
}

int32_t llaisysLayerNorm(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t in,
                         llaisysTensor_t weight, llaisysTensor_t bias, float epsilon) {
    return guard([&] {
        ops::layer_norm(stream_of(stream), tensor_of(out, "layer_norm: out"),
                        tensor_of(in, "layer_norm: in"), tensor_of(weight, "layer_norm: weight"),
                        bias != nullptr ? &tensor_of(bias, "layer_norm: bias") : nullptr, epsilon);
    });
}

int32_t llaisysAddRmsNorm(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t residual,
                          llaisysTensor_t in, llaisysTensor_t weight, float epsilon) {
    return guard([&] {
        ops::add_rms_norm(stream_of(stream), tensor_of(out, "add_rms_norm: out"),
                          tensor_of(residual, "add_rms_norm: residual"),
                          tensor_of(in, "add_rms_norm: in"),
                          tensor_of(weight, "add_rms_norm: weight"), epsilon);
    });
}

int32_t llaisysRope(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t in,
                    llaisysTensor_t positions, llaisysTensor_t inv_freq) {
    return guard([&] {
        ops::rope(stream_of(stream), tensor_of(out, "rope: out"), tensor_of(in, "rope: in"),
                  tensor_of(positions, "rope: positions"), tensor_of(inv_freq, "rope: inv_freq"));
    });
}

int32_t llaisysKvStore(llaisysStream_t stream, llaisysTensor_t cache, llaisysTensor_t values,
                       llaisysTensor_t slots) {
    return guard([&] {
        const Tensor &target = tensor_of(cache, "kv_store: cache");
        ops::kv_store(stream_of(stream), ops::slot_major(target, target),
                      tensor_of(values, "kv_store: values"), nullptr,
                      tensor_of(slots, "kv_store: slots"));
    });
}

namespace {

ops::AttentionLists lists_of(llaisysTensor_t q_rows, llaisysTensor_t begin, llaisysTensor_t end,
                             llaisysTensor_t tables, int32_t block_size) {
    ops::AttentionLists lists;
    lists.q_rows = tensor_of(q_rows, "attention: q_rows");
    lists.begin = tensor_of(begin, "attention: begin");
    lists.end = tensor_of(end, "attention: end");
    lists.tables = tensor_of(tables, "attention: tables");
    lists.block_size = block_size;
    return lists;
}

void attend(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t q, llaisysTensor_t k_cache,
            llaisysTensor_t v_cache, const ops::AttentionLists &lists, float scale,
            float soft_cap = 0.0f) {
    const ops::KvLayer kv = ops::slot_major(tensor_of(k_cache, "attention: k_cache"),
                                            tensor_of(v_cache, "attention: v_cache"));
    ops::attention(stream_of(stream), tensor_of(out, "attention: out"),
                   tensor_of(q, "attention: q"), kv, lists, scale, soft_cap);
}

} // namespace

int32_t llaisysAttention(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t q,
                         llaisysTensor_t k_cache, llaisysTensor_t v_cache, llaisysTensor_t q_rows,
                         llaisysTensor_t begin, llaisysTensor_t end, llaisysTensor_t tables,
                         int32_t block_size, float scale) {
    return guard([&] {
        attend(stream, out, q, k_cache, v_cache, lists_of(q_rows, begin, end, tables, block_size),
               scale);
    });
}

int32_t llaisysAttentionSoftCap(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t q,
                                llaisysTensor_t k_cache, llaisysTensor_t v_cache,
                                llaisysTensor_t q_rows, llaisysTensor_t begin, llaisysTensor_t end,
                                llaisysTensor_t tables, int32_t block_size, float scale,
                                float soft_cap) {
    return guard([&] {
        attend(stream, out, q, k_cache, v_cache, lists_of(q_rows, begin, end, tables, block_size),
               scale, soft_cap);
    });
}

int32_t llaisysAttentionRuns(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t q,
                             llaisysTensor_t k_cache, llaisysTensor_t v_cache,
                             llaisysTensor_t q_rows, llaisysTensor_t begin, llaisysTensor_t end,
                             llaisysTensor_t tables, llaisysTensor_t runs, int64_t longest,
                             int32_t block_size, float scale) {
    return guard([&] {
        ops::AttentionLists lists = lists_of(q_rows, begin, end, tables, block_size);
        lists.runs.is_known = true;
        lists.runs.are_all_single = runs == nullptr;
        if (runs != nullptr) {
            lists.runs.runs = tensor_of(runs, "attention: runs");
            require(lists.runs.runs.ndim() == 2 && lists.runs.runs.size(1) == 2 &&
                        lists.runs.runs.dtype() == LLAISYS_DTYPE_I32 &&
                        lists.runs.runs.device() == lists.q_rows.device(),
                    "attention: runs must be i32 [n_runs, 2] on the device of q_rows");
            require(longest >= 2, "attention: longest must be at least 2, got ", longest);
            lists.runs.n_runs = lists.runs.runs.size(0);
            lists.runs.longest = longest;
        }
        attend(stream, out, q, k_cache, v_cache, lists, scale);
    });
}

int32_t llaisysSelfAttentionMasked(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t q,
                                   llaisysTensor_t k, llaisysTensor_t v, llaisysTensor_t mask,
                                   float scale) {
    return guard([&] {
        ops::self_attention_masked(stream_of(stream), tensor_of(out, "self_attention_masked: out"),
                                   tensor_of(q, "self_attention_masked: q"),
                                   tensor_of(k, "self_attention_masked: k"),
                                   tensor_of(v, "self_attention_masked: v"),
                                   tensor_of(mask, "self_attention_masked: mask"), scale);
    });
}

int32_t llaisysQuantise(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t in) {
    return guard([&] {
        ops::quantise(stream_of(stream), tensor_of(out, "quantise: out"),
                      tensor_of(in, "quantise: in"));
    });
}

int32_t llaisysRearrange(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t in) {
    return guard([&] {
        ops::rearrange(stream_of(stream), tensor_of(out, "rearrange: out"),
                       tensor_of(in, "rearrange: in"));
    });
}

int32_t llaisysSwiGLU(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t gate,
                      llaisysTensor_t up) {
    return guard([&] {
        ops::swiglu(stream_of(stream), tensor_of(out, "swiglu: out"),
                    tensor_of(gate, "swiglu: gate"), tensor_of(up, "swiglu: up"));
    });
}

int32_t llaisysGeGLU(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t gate,
                     llaisysTensor_t up) {
    return guard([&] {
        ops::geglu(stream_of(stream), tensor_of(out, "geglu: out"), tensor_of(gate, "geglu: gate"),
                   up != nullptr ? &tensor_of(up, "geglu: up") : nullptr);
    });
}

int32_t llaisysScale(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t in, float factor,
                     float soft_cap) {
    return guard([&] {
        ops::scale(stream_of(stream), tensor_of(out, "scale: out"), tensor_of(in, "scale: in"),
                   factor, soft_cap);
    });
}

int32_t llaisysSoftmax(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t in) {
    return guard([&] {
        ops::softmax(stream_of(stream), tensor_of(out, "softmax: out"),
                     tensor_of(in, "softmax: in"));
    });
}

int32_t llaisysTopK(llaisysStream_t stream, llaisysTensor_t index, llaisysTensor_t value,
                    llaisysTensor_t values) {
    return guard([&] {
        ops::topk(stream_of(stream), tensor_of(index, "topk: index"),
                  tensor_of(value, "topk: value"), tensor_of(values, "topk: values"));
    });
}
