#include "capi/guard.hpp"
#include "ops/attention/op.hpp"
#include "ops/elementwise/op.hpp"
#include "ops/embedding/op.hpp"
#include "ops/glu/op.hpp"
#include "ops/kv_store/op.hpp"
#include "ops/moe/op.hpp"
#include "ops/norm/op.hpp"
#include "ops/quantise/op.hpp"
#include "ops/rearrange/op.hpp"
#include "ops/rope/op.hpp"
#include "ops/self_attention_masked/op.hpp"
#include "ops/topk/op.hpp"

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

// A tensor argument of an operator; NULL where the operator takes a pointer.
struct Argument {
    const char *name;
    llaisysTensor_t handle;
};

template <typename Parameter, typename Value>
decltype(auto) value_of(const char *op, const Value &value) {
    if constexpr (!std::is_same_v<Value, Argument>) {
        return value;
    } else if constexpr (std::is_pointer_v<Parameter>) {
        return value.handle != nullptr ? &tensor_of(value.handle, value.name, op) : nullptr;
    } else {
        return tensor_of(value.handle, value.name, op);
    }
}

// Runs an operator; its name and those of the arguments are for error texts.
template <typename... Parameters, typename... Values>
int32_t run(const char *op, void (*function)(const device::Stream &, Parameters...),
            llaisysStream_t stream, const Values &...values) {
    return guard([&] { function(stream_of(stream), value_of<Parameters>(op, values)...); });
}

constexpr int32_t kMaxParts = 64;

} // namespace

int32_t llaisysAdd(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t a,
                   llaisysTensor_t b) {
    return run("add", ops::add, stream, Argument{"out", out}, Argument{"a", a}, Argument{"b", b});
}

int32_t llaisysArgmax(llaisysStream_t stream, llaisysTensor_t max_index, llaisysTensor_t max_value,
                      llaisysTensor_t values) {
    return run("argmax", ops::argmax, stream, Argument{"max_index", max_index},
               Argument{"max_value", max_value}, Argument{"values", values}, ops::ArgmaxOnHost{});
}

int32_t llaisysEmbedding(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t index,
                         llaisysTensor_t table) {
    return run("embedding", ops::embedding, stream, Argument{"out", out}, Argument{"index", index},
               Argument{"table", table});
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

int32_t llaisysLinearWeightBytes(llaisysDeviceType_t device, llaisysDataType_t dtype,
                                 int64_t out_features, int64_t in_features, int64_t *bytes) {
    return guard([&] {
        *not_null(bytes, "bytes") =
            ops::LinearWeight::bytes_on(device, dtype, out_features, in_features);
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
    const ops::MoeRouting routing{is_sigmoid != 0, is_renormalised != 0, n_groups, n_top_groups,
                                  scale};
    return run("moe_route", ops::moe_route, stream, Argument{"experts", experts},
               Argument{"weights", weights}, Argument{"logits", logits}, Argument{"bias", bias},
               routing);
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
        const DType dtype = is_cpu                                ? LLAISYS_DTYPE_F32
                            : is_quantised(packed[0].all.dtype()) ? rows.dtype()
                                                                  : packed[0].all.dtype();
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
    return run("rms_norm", ops::rms_norm, stream, Argument{"out", out}, Argument{"in", in},
               Argument{"weight", weight}, epsilon);
}

int32_t llaisysAddRmsNorm(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t residual,
                          llaisysTensor_t in, llaisysTensor_t weight, float epsilon) {
    return run("add_rms_norm", ops::add_rms_norm, stream, Argument{"out", out},
               Argument{"residual", residual}, Argument{"in", in}, Argument{"weight", weight},
               epsilon);
}

int32_t llaisysRope(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t in,
                    llaisysTensor_t positions, llaisysTensor_t inv_freq) {
    return run("rope", ops::rope, stream, Argument{"out", out}, Argument{"in", in},
               Argument{"positions", positions}, Argument{"inv_freq", inv_freq}, 1.0f);
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

int32_t llaisysAttention(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t q,
                         llaisysTensor_t k_cache, llaisysTensor_t v_cache, llaisysTensor_t q_rows,
                         llaisysTensor_t begin, llaisysTensor_t end, llaisysTensor_t tables,
                         llaisysTensor_t sinks, llaisysTensor_t runs, int64_t longest,
                         int32_t block_size, float scale, float soft_cap) {
    return guard([&] {
        ops::AttentionLists lists;
        lists.q_rows = tensor_of(q_rows, "attention: q_rows");
        lists.begin = tensor_of(begin, "attention: begin");
        lists.end = tensor_of(end, "attention: end");
        lists.tables = tensor_of(tables, "attention: tables");
        lists.block_size = block_size;
        lists.runs.is_known = longest > 0;
        lists.runs.are_all_single = longest == 1;
        require(longest >= 0 && (runs != nullptr) == (longest >= 2), "attention: longest: got ",
                longest,
                runs != nullptr ? ", expected at least 2" : ", expected 0 or 1 without runs");
        if (runs != nullptr) {
            lists.runs.runs = tensor_of(runs, "attention: runs");
            require(lists.runs.runs.ndim() == 2 && lists.runs.runs.size(1) == 2 &&
                        lists.runs.runs.dtype() == LLAISYS_DTYPE_I32 &&
                        lists.runs.runs.device() == lists.q_rows.device(),
                    "attention: runs must be i32 [n_runs, 2] on the device of q_rows");
            lists.runs.n_runs = lists.runs.runs.size(0);
            lists.runs.longest = longest;
        }
        const Tensor &keys = tensor_of(k_cache, "attention: k_cache");
        const Tensor &result = tensor_of(out, "attention: out");
        const ops::KvLayer kv =
            v_cache != nullptr ? ops::slot_major(keys, tensor_of(v_cache, "attention: v_cache"))
                               : ops::slot_major(keys, result.ndim() == 3 ? result.size(2) : 0);
        ops::attention(stream_of(stream), result, tensor_of(q, "attention: q"), kv, lists, scale,
                       soft_cap,
                       sinks != nullptr ? &tensor_of(sinks, "attention: sinks") : nullptr);
    });
}

int32_t llaisysSelfAttentionMasked(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t q,
                                   llaisysTensor_t k, llaisysTensor_t v, llaisysTensor_t mask,
                                   float scale) {
    return run("self_attention_masked", ops::self_attention_masked, stream, Argument{"out", out},
               Argument{"q", q}, Argument{"k", k}, Argument{"v", v}, Argument{"mask", mask}, scale);
}

int32_t llaisysQuantise(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t in) {
    return run("quantise", ops::quantise, stream, Argument{"out", out}, Argument{"in", in});
}

int32_t llaisysRearrange(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t in) {
    return run("rearrange", ops::rearrange, stream, Argument{"out", out}, Argument{"in", in});
}

int32_t llaisysSwiGLU(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t gate,
                      llaisysTensor_t up) {
    return run("swiglu", ops::swiglu, stream, Argument{"out", out}, Argument{"gate", gate},
               Argument{"up", up});
}

int32_t llaisysTopK(llaisysStream_t stream, llaisysTensor_t index, llaisysTensor_t value,
                    llaisysTensor_t values) {
    return run("topk", ops::topk, stream, Argument{"index", index}, Argument{"value", value},
               Argument{"values", values});
}
