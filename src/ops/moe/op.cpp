#include "ops/moe/op.hpp"

#include "ops/checks.hpp"

#include <cmath>

namespace llaisys::ops {

namespace {

void check_experts(const Checks &check, const char *argument, const ExpertWeights *weights,
                   int64_t out_features, int64_t in_features) {
    require(weights != nullptr && weights->defined(), check.op, ": ", argument,
            ": got none, expected experts");
    require(weights->out_features == out_features && weights->in_features == in_features, check.op,
            ": ", argument, ": got experts of [", weights->out_features, ", ", weights->in_features,
            "], expected [", out_features, ", ", in_features, "]");
}

void check_bias(const Checks &check, const char *argument, const Tensor *bias, int64_t experts,
                int64_t out_features) {
    if (bias != nullptr) {
        check.real_rows(argument, *bias, {experts, out_features});
        check.contiguous(argument, *bias);
    }
}

void check_scratch(const Checks &check, const char *argument, const Tensor &tensor, int64_t rows,
                   int64_t columns) {
    check.real_output(argument, tensor, {rows, columns});
    check.contiguous(argument, tensor);
}

// Checks the selected experts of n tokens and their weights; returns the experts of a token.
int64_t check_selected(const Checks &check, const Tensor &experts, const Tensor &weights,
                       int64_t n) {
    const int64_t k = experts.size(1);
    check.dense("experts", experts, LLAISYS_DTYPE_I32, {n, k});
    check.dense("weights", weights, LLAISYS_DTYPE_F32, {n, k});
    return k;
}

void check_routing(const MoeRouting &routing, int64_t n_experts, int64_t k) {
    const int groups = routing.n_groups;
    require(groups >= 1 && n_experts % groups == 0, "moe_route: n_groups must divide ", n_experts,
            " experts, got ", groups);
    require(routing.n_top_groups >= 1 && routing.n_top_groups <= groups,
            "moe_route: n_top_groups must be in [1, ", groups, "], got ", routing.n_top_groups);
    require(k >= 1 && k <= n_experts / groups * routing.n_top_groups,
            "moe_route: experts of a token must be in [1, ",
            n_experts / groups * routing.n_top_groups, "], got ", k);
    require(std::isfinite(routing.scale), "moe_route: scale must be finite, got ", routing.scale);
}

void check_mlp(const Checks &check, const ExpertMlp &mlp, int64_t count, int64_t hidden,
               int64_t inner) {
    check_experts(check, "gate", mlp.gate, inner, hidden);
    check_experts(check, "up", mlp.up, inner, hidden);
    check_experts(check, "down", mlp.down, hidden, inner);
    require(mlp.gate->count == count && mlp.up->count == count && mlp.down->count == count,
            check.op, ": gate, up and down must have ", count, " experts, got ", mlp.gate->count,
            ", ", mlp.up->count, " and ", mlp.down->count);
    check_bias(check, "gate_bias", mlp.gate_bias, count, inner);
    check_bias(check, "up_bias", mlp.up_bias, count, inner);
    check_bias(check, "down_bias", mlp.down_bias, count, hidden);
}

} // namespace

ExpertWeights ExpertWeights::pack(const device::Stream &stream, const Tensor &weight,
                                  int64_t count) {
    require(count >= 1 && weight.ndim() == 2 && weight.size(0) % count == 0,
            "experts: weight must be [", count, " * out, in], got ", weight.shape());
    ExpertWeights packed;
    packed.count = count;
    packed.out_features = weight.size(0) / count;
    packed.in_features = weight.size(1);
    if (LinearWeight::lies_in_rows(stream)) {
        packed.all = LinearWeight::pack(stream, weight);
        return packed;
    }
    packed.each.reserve(size_t(count));
    for (int64_t e = 0; e < count; ++e) {
        const int64_t first = e * packed.out_features;
        packed.each.push_back(
            LinearWeight::pack(stream, weight.slice(0, first, first + packed.out_features)));
    }
    return packed;
}

int64_t moe_sorted_size(int64_t n_pairs, int64_t n_experts) { return n_experts + 1 + n_pairs; }

void moe_route(const device::Stream &stream, const Tensor &experts, const Tensor &weights,
               const Tensor &logits, const Tensor *bias, const MoeRouting &routing) {
    const Checks check{"moe_route", stream};
    check.matrix("logits", logits, LLAISYS_DTYPE_F32);
    const int64_t n = logits.size(0);
    const int64_t n_experts = logits.size(1);
    const int64_t k = check_selected(check, experts, weights, n);
    check.optional_vector("bias", bias, LLAISYS_DTYPE_F32, n_experts);
    check_routing(routing, n_experts, k);
    check.dispatch(LLAISYS_KERNELS(moe_route), experts, weights, logits, bias, routing);
}

bool moe_norm_route(const device::Stream &stream, const Tensor &experts, const Tensor &weights,
                    const RouterInput &input, const Tensor *bias, const MoeRouting &routing) {
    const Checks check{"moe_norm_route", stream};
    const int64_t k = check_selected(check, experts, weights, input.residual.size(0));
    check_routing(routing, input.router->out_features, k);
    check.optional_vector("bias", bias, LLAISYS_DTYPE_F32, input.router->out_features);
#if defined(LLAISYS_HAVE_CUDA)
    if (stream.type() == LLAISYS_DEVICE_NVIDIA) {
        return moe_norm_route_cuda(stream, experts, weights, input, bias, routing);
    }
#endif
    return false;
}

bool moe_token(const device::Stream &stream, const RouterInput &input, const Tensor *bias,
               const MoeRouting &routing, const ExpertMlp &mlp, int64_t k) {
    const Checks check{"moe_token", stream};
    const int64_t hidden = input.residual.size(1), inner = mlp.gate->out_features;
    const int64_t count = input.router->out_features;
    check_routing(routing, count, k);
    check.optional_vector("bias", bias, LLAISYS_DTYPE_F32, count);
    check_mlp(check, mlp, count, hidden, inner);
#if defined(LLAISYS_HAVE_CUDA)
    if (stream.type() == LLAISYS_DEVICE_NVIDIA) {
        return moe_token_cuda(stream, input, bias, routing, mlp, k);
    }
#endif
    return false;
}

void moe_mlp(const device::Stream &stream, const Tensor &out, bool adds, const Tensor &in,
             const Tensor &experts, const Tensor &weights, const ExpertMlp &mlp,
             const MoeBuffers &buffers) {
    const Checks check{"moe_mlp", stream};
    check.real_rows("in", in, 2);
    const int64_t n = in.size(0);
    const int64_t hidden = in.size(1);
    const int64_t k = check_selected(check, experts, weights, n);
    require(mlp.gate != nullptr && mlp.gate->defined(),
            "moe_mlp: gate: got none, expected experts");
    const int64_t inner = mlp.gate->out_features;
    const int64_t count = mlp.gate->count;
    check_mlp(check, mlp, count, hidden, inner);
    check.real_output("out", out, {n, hidden});
    if (adds) {
        check.dtype("out", out, LLAISYS_DTYPE_F32);
    }
    check_scratch(check, "buffers.gate", buffers.gate, n * k, inner);
    check_scratch(check, "buffers.out", buffers.out, n * k, hidden);
    if (n == 0) {
        return;
    }
    if (stream.type() == LLAISYS_DEVICE_CPU) {
        check_scratch(check, "buffers.up", buffers.up, n * k, inner);
        check.index_range("experts", experts.view({n * k}), count);
    } else {
        check.vector("buffers.sorted", buffers.sorted, LLAISYS_DTYPE_I32,
                     moe_sorted_size(n * k, count));
    }
    check.dispatch(LLAISYS_KERNELS(moe_mlp), out, adds, in, experts, weights, mlp, buffers);
}

void sigmoid_scale(const device::Stream &stream, const Tensor &rows, const Tensor &logits) {
    const Checks check{"sigmoid_scale", stream};
    check.real_output("rows", rows, 2);
    check.dense("logits", logits, LLAISYS_DTYPE_F32, {rows.size(0), 1});
    check.dispatch(LLAISYS_KERNELS(sigmoid_scale), rows, logits);
}

} // namespace llaisys::ops
