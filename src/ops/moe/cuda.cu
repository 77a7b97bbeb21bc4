// Selects the kernels of a mixture of experts:
//
//   moe_route      cuda_route.cuh; up to 32 tokens with the norm and the router in one kernel
//   moe_token      cuda_token.cuh: routing and experts of one token in one kernel
//   moe_mlp        16-bit activations of one dtype
//                  weights of that dtype, hs and di multiples of 8
//     1 to 4 tokens    cuda_gemv.cuh
//     more             sort_kernel, cuda_gemm.cuh, sum_kernel
//     48 per expert    sort_kernel, cuda_gemm_sm90.cuh, sum_kernel
//     batch-invariant  always sort_kernel, cuda_gemm.cuh, sum_kernel
//                  quantised weights, gate and up of one layout: cuda_quant.cuh
//     1 to 4 tokens    without sorting, unless batch-invariant
//     more             sort_kernel, tiles of 16 or 64 pairs, sum_kernel
//   everything else    cuda_reference.cuh
//
// No result is read by the host: all launches are fit for graph capture.
#include "ops/moe/op.hpp"

#include "ops/cuda/dispatch.cuh"
#include "ops/cuda/quant_weight.cuh"
#include "ops/moe/cuda_gemm.cuh"
#include "ops/moe/cuda_gemm_sm90.cuh"
#include "ops/moe/cuda_gemv.cuh"
#include "ops/moe/cuda_quant.cuh"
#include "ops/moe/cuda_reference.cuh"
#include "ops/moe/cuda_route.cuh"
#include "ops/moe/cuda_sort.cuh"

#include <algorithm>
#include <cmath>

namespace llaisys::ops {

namespace {

using cuda::is_16_byte_aligned;

constexpr int kThreads = 256;

// out[t] (+)= sum over j of weights[t, j] * pairs[t * k + j], eight columns per thread.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_kernel(cuda::MoeArgs<T> args) {
    cuda::launch_dependents();
    cuda::grid_dependency_wait();
    const int64_t token = blockIdx.y;
    const int column = (int(blockIdx.x) * kThreads + int(threadIdx.x)) * 8;
    if (column >= args.hs) {
        return;
    }
    const int64_t at = token * args.ldo + column;
    const bool is_f32 = args.out.dtype == LLAISYS_DTYPE_F32 && args.ldo % 4 == 0;
    float4 *to = reinterpret_cast<float4 *>(static_cast<float *>(args.out.data) + at);
    float4 before[2] = {};
    if (is_f32 && args.adds) {
        before[0] = to[0];
        before[1] = to[1];
    }
    constexpr int kAtOnce = 4;
    const T *rows = args.expert_out + token * args.top_k * args.hs + column;
    const float *weights = args.weights + token * args.top_k;
    float sums[8] = {};
    for (int first = 0; first < args.top_k; first += kAtOnce) {
        uint4 units[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            units[i] = first + i < args.top_k
                           ? *reinterpret_cast<const uint4 *>(rows + int64_t(first + i) * args.hs)
                           : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            if (first + j < args.top_k) {
                const T *values = reinterpret_cast<const T *>(&units[j]);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    sums[i] += weights[first + j] * cuda::to_float(values[i]);
                }
            }
        }
    }
    if (is_f32) {
        to[0] = make_float4(before[0].x + sums[0], before[0].y + sums[1], before[0].z + sums[2],
                            before[0].w + sums[3]);
        to[1] = make_float4(before[1].x + sums[4], before[1].y + sums[5], before[1].z + sums[6],
                            before[1].w + sums[7]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        args.out.store(at + i, args.adds ? args.out.load(at + i) + sums[i] : sums[i]);
    }
}

__global__ void sigmoid_scale_kernel(cuda::Reals rows, int64_t ld, const float *logits, int64_t d) {
    cuda::launch_dependents();
    cuda::grid_dependency_wait();
    const float factor = 1.0f / (1.0f + expf(-logits[blockIdx.x]));
    for (int64_t i = threadIdx.x; i < d; i += kThreads) {
        const int64_t at = blockIdx.x * ld + i;
        rows.store(at, rows.load(at) * factor);
    }
}

// -- Dispatch -------------------------------------------------------------------------------------

template <typename T>
void sort_pairs(const device::CudaStream &stream, const cuda::MoeArgs<T> &args, int32_t *sorted) {
    const int pairs = args.n * args.top_k;
    const int threads = std::min(cuda::kSortThreads, std::max(128, (pairs + 127) / 128 * 32));
    cuda::launch(stream, cuda::sort_kernel, unsigned(args.n_experts), unsigned(threads), 0, true,
                 sorted, args.experts, pairs, args.n_experts);
}

template <typename T>
void sum_pairs(const device::CudaStream &stream, const cuda::MoeArgs<T> &args) {
    const dim3 grid(cuda::ceil_div(args.hs, 8 * kThreads), unsigned(args.n));
    cuda::launch(stream, sum_kernel<T>, grid, kThreads, 0, true, args);
}

template <typename T>
void run_quantised(const device::CudaStream &stream, const cuda::MoeArgs<T> &args,
                   const cuda::MoeQuantWeights &w, int32_t *sorted) {
    const bool is_few = args.n <= cuda::kMoeGemvTokens && !stream.is_exact;
    if (!is_few) {
        sort_pairs<T>(stream, args, sorted);
    }
    cuda::moe_quant_product<T>(stream, args, w, is_few, false);
    cuda::moe_quant_product<T>(stream, args, w, is_few, true);
    if (!is_few) {
        sum_pairs<T>(stream, args);
    }
}

template <typename T> void run(device::CudaStream &stream, cuda::MoeArgs<T> args, int32_t *sorted) {
    if (args.n <= cuda::kMoeGemvTokens && !stream.is_exact) {
        return cuda::moe_mlp_gemv<T>(stream, args);
    }
    sort_pairs<T>(stream, args, sorted);
    const int mean = args.n * args.top_k / args.n_experts;
    if (mean >= 48 && !stream.is_exact && cuda::has_moe_gemm_sm90(stream)) {
        cuda::moe_gemm_sm90<T>(stream, args);
    } else {
        const int tile = mean < 2 ? 8 : mean < 6 ? 16 : mean < 24 ? 32 : mean < 64 ? 64 : 128;
        cuda::dispatch_int<8, 16, 32, 64, 128>(
            tile, [&](auto tile_n) { cuda::moe_gemm<T, tile_n()>(stream, args); });
    }
    sum_pairs<T>(stream, args);
}

bool has_codes(const ExpertWeights &weights) { return is_quantised(weights.all.dtype()); }

// Whether gate, up and down are quantised and the kernels of cuda_quant.cuh read them.
bool has_quant_kernels(const ExpertMlp &mlp) {
    if (!has_codes(*mlp.gate) || !has_codes(*mlp.up) || !has_codes(*mlp.down)) {
        return false;
    }
    const QuantRowLayout gate = quant_matrix_of(mlp.gate->all).layout;
    const QuantRowLayout up = quant_matrix_of(mlp.up->all).layout;
    return gate.codes == up.codes && gate.group == up.group && gate.param_bytes == up.param_bytes;
}

// Whether gate, up and down have 16-bit values of this dtype.
bool has_plain_kernels(DType dtype, const ExpertMlp &mlp) {
    const Tensor &gate = mlp.gate->all.bytes, &up = mlp.up->all.bytes, &down = mlp.down->all.bytes;
    return gate.dtype() == dtype && up.dtype() == dtype && down.dtype() == dtype &&
           is_16_byte_aligned(gate) && is_16_byte_aligned(up) && is_16_byte_aligned(down);
}

bool is_fast(const Tensor &in, const Tensor &experts, const ExpertMlp &mlp,
             const MoeBuffers &buffers) {
    const DType dtype = in.dtype();
    return dtype != LLAISYS_DTYPE_F32 && buffers.gate.dtype() == dtype &&
           buffers.out.dtype() == dtype && mlp.gate->in_features % 8 == 0 &&
           mlp.gate->out_features % 8 == 0 && in.stride(0) % 8 == 0 && is_16_byte_aligned(in) &&
           is_16_byte_aligned(experts) && is_16_byte_aligned(buffers.gate) &&
           is_16_byte_aligned(buffers.out) && mlp.gate->count <= cuda::kMoeMaxExperts &&
           (has_plain_kernels(dtype, mlp) || has_quant_kernels(mlp));
}

cuda::MoeMatrix matrix_of(const ExpertWeights &weights) {
    if (has_codes(weights)) {
        return {{nullptr, LLAISYS_DTYPE_F32}, quant_matrix_of(weights.all)};
    }
    return {cuda::reals(weights.all.bytes), {}};
}

} // namespace

void moe_route_cuda(const device::Stream &stream, const Tensor &experts, const Tensor &weights,
                    const Tensor &logits, const Tensor *bias, const MoeRouting &routing) {
    const int n = int(logits.size(0));
    const int n_experts = int(logits.size(1));
    require(n_experts <= cuda::kMoeMaxExperts, "moe_route: experts must be at most ",
            cuda::kMoeMaxExperts, " on CUDA, got ", n_experts);
    require(routing.n_groups <= cuda::kRouteMaxGroups || routing.n_top_groups == routing.n_groups,
            "moe_route: n_groups must be at most ", cuda::kRouteMaxGroups, " on CUDA, got ",
            routing.n_groups);
    if (n == 0) {
        return;
    }
    const float *given = bias != nullptr ? bias->as<float>() : nullptr;
    cuda::dispatch_route(n_experts, [&](auto per_lane) {
        cuda::launch(device::cuda_stream_of(stream), cuda::route_kernel<per_lane()>,
                     cuda::ceil_div(n, cuda::kRouteWarps),
                     unsigned(cuda::kRouteWarps * cuda::kWarpSize), 0, true, experts.as<int32_t>(),
                     weights.as<float>(), logits.as<float>(), given, n, n_experts,
                     int(experts.size(1)), routing);
    });
}

bool moe_norm_route_cuda(const device::Stream &stream, const Tensor &experts, const Tensor &weights,
                         const RouterInput &input, const Tensor *bias, const MoeRouting &routing) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const Tensor &normed = input.normed, &residual = input.residual;
    const Tensor &router = input.router->bytes;
    const int n_experts = int(input.router->out_features), hs = int(residual.size(1));
    const int n = int(residual.size(0));
    if (n < 1 || n > cuda::kNormRouteTokens || cuda_stream.is_exact || !cuda_stream.has_pdl ||
        hs % 8 != 0 || hs > cuda::kNormRouteMaxHidden || n_experts > cuda::kMoeMaxExperts ||
        (routing.n_groups > cuda::kRouteMaxGroups && routing.n_top_groups < routing.n_groups) ||
        normed.dtype() == LLAISYS_DTYPE_F32 || is_quantised(input.router->dtype()) ||
        router.dtype() != normed.dtype() || residual.dtype() != LLAISYS_DTYPE_F32 ||
        input.norm_weight.dtype() != LLAISYS_DTYPE_F32 || normed.stride(0) % 8 != 0 ||
        residual.stride(0) % 4 != 0 || !is_16_byte_aligned(normed) ||
        !is_16_byte_aligned(residual) || !is_16_byte_aligned(router) ||
        !is_16_byte_aligned(input.norm_weight)) {
        return false;
    }
    cuda::dispatch_half(normed.dtype(), [&](auto type) {
        using T = decltype(type);
        const cuda::NormRoute<T> args{residual.as<float>(),
                                      residual.stride(0),
                                      input.norm_weight.as<float>(),
                                      input.epsilon,
                                      reinterpret_cast<T *>(normed.data()),
                                      normed.stride(0),
                                      reinterpret_cast<const T *>(router.data()),
                                      cuda::reals(input.router_bias),
                                      bias != nullptr ? bias->as<float>() : nullptr,
                                      experts.as<int32_t>(),
                                      weights.as<float>(),
                                      n_experts,
                                      int(experts.size(1)),
                                      hs,
                                      routing};
        cuda::dispatch_route(n_experts, [&](auto per_lane) {
            cuda::launch(cuda_stream, cuda::norm_route_kernel<T, per_lane()>,
                         dim3(cuda::kNormRouteCluster, unsigned(n)), cuda::kNormRouteThreads, 0,
                         {true, cuda::kNormRouteCluster}, args);
        });
    });
    return true;
}

void moe_mlp_cuda(const device::Stream &stream, const Tensor &out, bool adds, const Tensor &in,
                  const Tensor &experts, const Tensor &weights, const ExpertMlp &mlp,
                  const MoeBuffers &buffers) {
    device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    // What the arguments of all kernels have.
    const auto fill = [&](auto *args) {
        args->experts = experts.as<int32_t>();
        args->weights = weights.as<float>();
        args->ldx = in.stride(0);
        args->out = cuda::reals(out);
        args->ldo = out.stride(0);
        args->adds = adds;
        args->n = int(in.size(0));
        args->top_k = int(experts.size(1));
        cuda::set_mlp(args, mlp);
    };
    if (!is_fast(in, experts, mlp, buffers)) {
        cuda::MoeReference args{};
        fill(&args);
        args.x = cuda::reals(in);
        args.gate = matrix_of(*mlp.gate);
        args.up = matrix_of(*mlp.up);
        args.down = matrix_of(*mlp.down);
        args.hidden = cuda::reals(buffers.gate);
        return cuda::run_moe_reference(cuda_stream, args);
    }
    cuda::dispatch_half(in.dtype(), [&](auto type) {
        using T = decltype(type);
        cuda::MoeArgs<T> args{};
        fill(&args);
        args.x = reinterpret_cast<const T *>(in.data());
        args.sorted = buffers.sorted.as<int32_t>();
        args.hidden = reinterpret_cast<T *>(buffers.gate.data());
        args.expert_out = reinterpret_cast<T *>(buffers.out.data());
        args.n_experts = int(mlp.gate->count);
        if (has_codes(*mlp.gate)) {
            const cuda::MoeQuantWeights w{quant_matrix_of(mlp.gate->all),
                                          quant_matrix_of(mlp.up->all),
                                          quant_matrix_of(mlp.down->all)};
            return run_quantised<T>(cuda_stream, args, w, buffers.sorted.as<int32_t>());
        }
        cuda::set_weights(&args, mlp);
        run<T>(cuda_stream, args, buffers.sorted.as<int32_t>());
    });
}

void sigmoid_scale_cuda(const device::Stream &stream, const Tensor &rows, const Tensor &logits) {
    if (rows.size(0) > 0) {
        cuda::launch(device::cuda_stream_of(stream), sigmoid_scale_kernel, unsigned(rows.size(0)),
                     kThreads, 0, true, cuda::reals(rows), rows.stride(0), logits.as<float>(),
                     rows.size(1));
    }
}

} // namespace llaisys::ops
