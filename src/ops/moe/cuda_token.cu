// Launches cuda_token.cuh.
#include "ops/cuda/dispatch.cuh"
#include "ops/moe/cuda_token.cuh"
#include "ops/moe/op.hpp"

#include <algorithm>

namespace llaisys::ops {

namespace {

using cuda::is_16_byte_aligned;

constexpr int kStages = 2;        // per warp
constexpr int kStageValues = 768; // of each row of a unit, at most

cuda::MoeTokenConfig config_of(int hs, int di, int top_k, int grid) {
    constexpr int kLine = 64; // values per 128-byte line
    cuda::MoeTokenConfig s{};
    s.stages = kStages;
    const auto divide = [&](int length, int *block, int *blocks) {
        *blocks = (length + kStageValues - 1) / kStageValues;
        *block = (length + *blocks * kLine - 1) / (*blocks * kLine) * kLine;
        *blocks = (length + *block - 1) / *block;
    };
    divide(hs, &s.up_block, &s.up_blocks);
    divide(di, &s.down_block, &s.down_blocks);
    s.stage_bytes = uint32_t(std::max(s.up_block, s.down_block)) * 4;
    const uint32_t buffer = std::max(uint32_t(cuda::kTokenWarps * kStages) * s.stage_bytes,
                                     uint32_t(cuda::kTokenRouterRows * hs) * 2);
    const auto aligned = [](uint32_t bytes) { return (bytes + 15) / 16 * 16; };
    s.x_at = aligned(buffer);
    s.hidden_at = s.x_at + aligned(uint32_t(hs) * 4);
    s.own_at = s.hidden_at + aligned(uint32_t(top_k * di) * 4);
    const int own_hidden = 2 * int(cuda::ceil_div(top_k * di / 2, grid));
    s.sums_at = s.own_at + aligned(uint32_t(own_hidden) * 2);
    s.barriers_at = s.sums_at + aligned(cuda::ceil_div(hs / 2, grid) * uint32_t(top_k) * 8);
    s.bytes = s.barriers_at + uint32_t(cuda::kTokenWarps * kStages) * 8;
    return s;
}

bool has_dtype(const LinearWeight &weight, DType dtype) {
    return !is_quantised(weight.dtype()) && weight.bytes.dtype() == dtype &&
           is_16_byte_aligned(weight.bytes);
}

} // namespace

bool moe_token_cuda(const device::Stream &stream, const RouterInput &input, const Tensor *bias,
                    const MoeRouting &routing, const ExpertMlp &mlp, int64_t k) {
    device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const Tensor &residual = input.residual, &normed = input.normed;
    const DType dtype = normed.dtype();
    const int hs = int(residual.size(1)), di = int(mlp.gate->out_features);
    const int n_experts = int(mlp.gate->count), grid = cuda_stream.n_sms;
    if (residual.size(0) != 1 || cuda_stream.is_exact || !cuda::has_bulk_copy(cuda_stream) ||
        hs % 8 != 0 || di % 8 != 0 || hs > cuda::kTokenMaxHidden || k > cuda::kTokenMaxK ||
        n_experts > std::min(cuda::kMoeMaxExperts, cuda::kTokenRouterRows * grid) ||
        (routing.n_groups > cuda::kRouteMaxGroups && routing.n_top_groups < routing.n_groups) ||
        dtype == LLAISYS_DTYPE_F32 || !has_dtype(*input.router, dtype) ||
        !has_dtype(mlp.gate->all, dtype) || !has_dtype(mlp.up->all, dtype) ||
        !has_dtype(mlp.down->all, dtype) || residual.dtype() != LLAISYS_DTYPE_F32 ||
        input.norm_weight.dtype() != LLAISYS_DTYPE_F32 || !is_16_byte_aligned(normed) ||
        !is_16_byte_aligned(residual) || !is_16_byte_aligned(input.norm_weight)) {
        return false;
    }
    const cuda::MoeTokenConfig config = config_of(hs, di, int(k), grid);
    constexpr uint32_t kOwnShared = 10 << 10; // upper bound of the static shared memory
    if (config.bytes + kOwnShared > uint32_t(cuda_stream.max_shared_bytes)) {
        return false;
    }
    const int n_words = n_experts + int(k) * di / 2;
    auto *words = static_cast<uint64_t *>(
        cuda_stream.counters.at_least(size_t(2 + n_words) * sizeof(uint64_t)));
    cuda::dispatch_half(dtype, [&](auto type) {
        using T = decltype(type);
        const auto values = [](const Tensor &tensor) {
            return reinterpret_cast<T *>(tensor.data());
        };
        cuda::MoeToken<T> args{};
        cuda::set_mlp(&args.experts, mlp);
        cuda::set_weights(&args.experts, mlp);
        args.experts.out = cuda::reals(residual);
        args.experts.n = 1;
        args.experts.top_k = int(k);
        args.experts.n_experts = n_experts;
        args.norm_weight = input.norm_weight.as<float>();
        args.epsilon = input.epsilon;
        args.normed = input.needs_normed ? values(normed) : nullptr;
        args.router = values(input.router->bytes);
        args.router_bias = cuda::reals(input.router_bias);
        args.bias = bias != nullptr ? bias->as<float>() : nullptr;
        args.routing = routing;
        args.readers = reinterpret_cast<uint32_t *>(words);
        args.logits = words + 2;
        args.hidden = args.logits + n_experts;
        args.s = config;
        const auto kernel =
            n_experts <= 128 ? cuda::moe_token_kernel<T, 4> : cuda::moe_token_kernel<T, 16>;
        cuda::set_max_dynamic_smem(kernel, size_t(cuda_stream.max_shared_bytes) - kOwnShared);
        cuda::launch(cuda_stream, kernel, unsigned(grid), cuda::kTokenThreads, config.bytes, true,
                     args);
    });
    return true;
}

} // namespace llaisys::ops
