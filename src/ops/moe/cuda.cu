// Selects the kernels of a mixture of experts:
//
//   moe_route      route_kernel: one warp per token
//   moe_mlp        16-bit values of one dtype, hs and di multiples of 8
//     1 to 4 tokens    cuda_gemv.cuh
//     more             sort_kernel, cuda_gemm.cuh, sum_kernel
//     48 per expert    sort_kernel, cuda_gemm_sm90.cuh, sum_kernel
//     batch-invariant  always sort_kernel, cuda_gemm.cuh, sum_kernel
//   everything else    reference kernels below; for tests
//
// No result is read by the host: all launches are fit for graph capture.
#include "ops/moe/cuda.hpp"

#include "ops/cuda/dispatch_dtype.cuh"
#include "ops/moe/cuda_gemm.cuh"
#include "ops/moe/cuda_gemm_sm90.cuh"
#include "ops/moe/cuda_gemv.cuh"

#include <algorithm>
#include <cmath>

namespace llaisys::ops {

namespace {

constexpr int kRouteWarps = 4;
constexpr int kMaxGroups = 32;
constexpr int kSortThreads = 1024;
constexpr int kThreads = 256;

struct Entry {
    float value; // never NaN
    int index;
};

// The largest value of the warp, the lowest index on a tie.
__device__ __forceinline__ Entry warp_best(Entry best) {
    for (int step = 16; step > 0; step >>= 1) {
        const float value = __shfl_xor_sync(cuda::kFullMask, best.value, step);
        const int index = __shfl_xor_sync(cuda::kFullMask, best.index, step);
        if (value > best.value || (value == best.value && index < best.index)) {
            best = {value, index};
        }
    }
    return best;
}

// PerLane: experts of a lane; expert e belongs to lane e % 32. Excluded and selected experts have
// the index INT32_MAX.
template <int PerLane>
__global__ void __launch_bounds__(kRouteWarps *cuda::kWarpSize)
    route_kernel(int32_t *experts, float *weights, const float *logits, const float *bias, int n,
                 int n_experts, int k, MoeRouting routing) {
    __shared__ float shared_choice[kRouteWarps][PerLane * cuda::kWarpSize];
    cuda::launch_dependents();
    cuda::grid_dependency_wait();
    const int lane = threadIdx.x % cuda::kWarpSize, warp = threadIdx.x / cuda::kWarpSize;
    const int token = int(blockIdx.x) * kRouteWarps + warp;
    if (token >= n) {
        return;
    }
    const float *row = logits + int64_t(token) * n_experts;
    float scores[PerLane], choice[PerLane];
    int index[PerLane];
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < PerLane; ++i) {
        const int e = i * cuda::kWarpSize + lane;
        index[i] = e < n_experts ? e : INT32_MAX;
        scores[i] = e < n_experts ? row[e] : -INFINITY;
        largest = fmaxf(largest, scores[i]); // ignores NaN
    }
    if (routing.is_sigmoid) {
#pragma unroll
        for (int i = 0; i < PerLane; ++i) {
            scores[i] = 1.0f / (1.0f + expf(-scores[i]));
        }
    } else {
        largest = cuda::warp_max(largest);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < PerLane; ++i) {
            scores[i] = largest == -INFINITY ? 0.0f : expf(scores[i] - largest);
            sum += scores[i] == scores[i] ? scores[i] : 0.0f;
        }
        sum = cuda::warp_sum(sum);
#pragma unroll
        for (int i = 0; i < PerLane; ++i) {
            scores[i] = sum > 0 ? scores[i] / sum : 0.0f;
        }
    }
#pragma unroll
    for (int i = 0; i < PerLane; ++i) {
        scores[i] = scores[i] == scores[i] ? scores[i] : -INFINITY;
        choice[i] =
            index[i] < n_experts ? scores[i] + (bias != nullptr ? bias[index[i]] : 0.0f) : 0.0f;
    }
    if (routing.n_top_groups < routing.n_groups) {
        const int width = n_experts / routing.n_groups;
#pragma unroll
        for (int i = 0; i < PerLane; ++i) {
            shared_choice[warp][i * cuda::kWarpSize + lane] = choice[i];
        }
        __syncwarp();
        Entry group{-INFINITY, INT32_MAX};
        if (lane < routing.n_groups) {
            float second = -INFINITY;
            for (int e = lane * width; e < (lane + 1) * width; ++e) {
                const float value = shared_choice[warp][e];
                if (value > group.value) {
                    second = group.value;
                    group.value = value;
                } else if (value > second) {
                    second = value;
                }
            }
            group.value += bias != nullptr && width > 1 ? second : 0.0f;
            group.index = lane;
        }
        unsigned kept = 0;
        for (int i = 0; i < routing.n_top_groups; ++i) {
            const Entry best = warp_best(group);
            kept |= 1u << best.index;
            if (best.index == lane) {
                group = {-INFINITY, INT32_MAX};
            }
        }
#pragma unroll
        for (int i = 0; i < PerLane; ++i) {
            if (index[i] < n_experts && (kept >> (index[i] / width) & 1) == 0) {
                index[i] = INT32_MAX;
            }
        }
    }
    float sum = 0, weight = 0; // lane j holds the weight of choice j below 32
    for (int j = 0; j < k; ++j) {
        Entry best{-INFINITY, INT32_MAX};
        float score = 0;
#pragma unroll
        for (int i = 0; i < PerLane; ++i) { // ascending experts: the first of equals stays
            if (index[i] != INT32_MAX && (best.index == INT32_MAX || choice[i] > best.value)) {
                best = {choice[i], index[i]};
            }
        }
        best = warp_best(best);
#pragma unroll
        for (int i = 0; i < PerLane; ++i) {
            if (index[i] == best.index) {
                score = scores[i] > -INFINITY ? scores[i] : 0.0f;
                index[i] = INT32_MAX;
            }
        }
        score = __shfl_sync(cuda::kFullMask, score, best.index % cuda::kWarpSize);
        sum += score;
        if (lane == 0) {
            experts[int64_t(token) * k + j] = best.index;
            weights[int64_t(token) * k + j] = score;
        }
        weight = lane == j ? score : weight;
    }
    const float factor = routing.is_renormalised ? routing.scale / (sum + 1e-20f) : routing.scale;
    if (lane < k) {
        weights[int64_t(token) * k + lane] = weight * factor;
    }
    if (lane == 0) { // more than 32 experts of a token
        for (int j = cuda::kWarpSize; j < k; ++j) {
            weights[int64_t(token) * k + j] *= factor;
        }
    }
}

// Block e writes offset e and the pairs of expert e in ascending order. Each thread counts a range
// of adjacent pairs.
__global__ void __launch_bounds__(kSortThreads)
    sort_kernel(int32_t *sorted, const int32_t *experts, int n_pairs, int n_experts) {
    constexpr int kWarps = kSortThreads / cuda::kWarpSize;
    __shared__ int warp_lower[kWarps], warp_equal[kWarps];
    cuda::launch_dependents();
    cuda::grid_dependency_wait();
    const int expert = int(blockIdx.x);
    const int lane = threadIdx.x % cuda::kWarpSize, warp = threadIdx.x / cuda::kWarpSize;
    const int each = (n_pairs + int(blockDim.x) - 1) / int(blockDim.x);
    const int begin = min(int(threadIdx.x) * each, n_pairs), end = min(begin + each, n_pairs);
    int lower = 0, equal = 0;
    for (int p = begin; p < end; ++p) {
        const int e = experts[p];
        lower += e < expert ? 1 : 0;
        equal += e == expert ? 1 : 0;
    }
    int before = equal; // inclusive
#pragma unroll
    for (int step = 1; step < cuda::kWarpSize; step *= 2) {
        const int other = __shfl_up_sync(cuda::kFullMask, before, step);
        before += lane >= step ? other : 0;
    }
    for (int step = 16; step > 0; step >>= 1) {
        lower += __shfl_xor_sync(cuda::kFullMask, lower, step);
    }
    if (lane == cuda::kWarpSize - 1) {
        warp_equal[warp] = before;
        warp_lower[warp] = lower;
    }
    __syncthreads();
    const int warps = int(blockDim.x) / cuda::kWarpSize;
    int start = 0, earlier = 0;
    for (int w = 0; w < warps; ++w) {
        start += warp_lower[w];
        earlier += w < warp ? warp_equal[w] : 0;
    }
    if (threadIdx.x == 0) {
        sorted[expert] = start;
        if (expert == n_experts - 1) {
            sorted[n_experts] = n_pairs;
        }
    }
    int32_t *to = sorted + n_experts + 1 + start + earlier + before - equal;
    for (int p = begin; p < end && equal > 0; ++p) {
        if (experts[p] == expert) {
            *to++ = p;
        }
    }
}

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
    float sums[8] = {};
    for (int j = 0; j < args.top_k; ++j) {
        const int64_t pair = token * args.top_k + j;
        const float weight = args.weights[pair];
        const uint4 unit =
            *reinterpret_cast<const uint4 *>(args.expert_out + pair * args.hs + column);
        const T *values = reinterpret_cast<const T *>(&unit);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sums[i] += weight * cuda::to_float(values[i]);
        }
    }
    const int64_t at = token * args.ldo + column;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        args.out.store(at + i, args.adds ? args.out.load(at + i) + sums[i] : sums[i]);
    }
}

// -- Reference ------------------------------------------------------------------------------------

// Weights, activations and scratch of any real dtypes.
struct Reference {
    cuda::Reals x, gate, up, down, hidden, out;
    cuda::Reals gate_bias, up_bias, down_bias;
    const int32_t *experts;
    const float *weights;
    int64_t ldx, ldo;
    int n, top_k, hs, di;
    bool adds;
    float limit, alpha;
};

__device__ float warp_dot(const cuda::Reals &a, int64_t a_at, const cuda::Reals &b, int64_t b_at,
                          int n) {
    float sum = 0;
    for (int i = threadIdx.x % cuda::kWarpSize; i < n; i += cuda::kWarpSize) {
        sum += a.load(a_at + i) * b.load(b_at + i);
    }
    return cuda::warp_sum(sum);
}

// One warp per output of a pair.
__global__ void reference_hidden_kernel(Reference args) {
    const int64_t item = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / cuda::kWarpSize;
    if (item >= int64_t(args.n) * args.top_k * args.di) {
        return;
    }
    const int64_t pair = item / args.di;
    const int64_t row = int64_t(args.experts[pair]) * args.di + item % args.di;
    const int64_t x = pair / args.top_k * args.ldx;
    float gate = warp_dot(args.gate, row * args.hs, args.x, x, args.hs);
    float up = warp_dot(args.up, row * args.hs, args.x, x, args.hs);
    gate += args.gate_bias.data != nullptr ? args.gate_bias.load(row) : 0.0f;
    up += args.up_bias.data != nullptr ? args.up_bias.load(row) : 0.0f;
    if (threadIdx.x % cuda::kWarpSize == 0) {
        args.hidden.store(item, cuda::moe_activation(gate, up, args.limit, args.alpha));
    }
}

// One warp per output of a token.
__global__ void reference_out_kernel(Reference args) {
    const int64_t item = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / cuda::kWarpSize;
    if (item >= int64_t(args.n) * args.hs) {
        return;
    }
    const int64_t token = item / args.hs;
    const int output = int(item % args.hs);
    float sum = 0;
    for (int j = 0; j < args.top_k; ++j) {
        const int64_t pair = token * args.top_k + j;
        const int64_t row = int64_t(args.experts[pair]) * args.hs + output;
        float value = warp_dot(args.down, row * args.di, args.hidden, pair * args.di, args.di);
        value += args.down_bias.data != nullptr ? args.down_bias.load(row) : 0.0f;
        sum += args.weights[pair] * value;
    }
    if (threadIdx.x % cuda::kWarpSize == 0) {
        const int64_t at = token * args.ldo + output;
        args.out.store(at, args.adds ? args.out.load(at) + sum : sum);
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

void run_reference(const device::CudaStream &stream, const Reference &args) {
    constexpr int kWarps = kThreads / cuda::kWarpSize;
    const int64_t hidden = int64_t(args.n) * args.top_k * args.di;
    const int64_t outputs = int64_t(args.n) * args.hs;
    cuda::launch(stream, reference_hidden_kernel, cuda::ceil_div(hidden, kWarps), kThreads, 0,
                 false, args);
    cuda::launch(stream, reference_out_kernel, cuda::ceil_div(outputs, kWarps), kThreads, 0, false,
                 args);
}

// -- Dispatch -------------------------------------------------------------------------------------

template <typename T> void run(device::CudaStream &stream, cuda::MoeArgs<T> args, int32_t *sorted) {
    if (args.n <= cuda::kMoeGemvTokens && !stream.is_exact) {
        return cuda::moe_mlp_gemv<T>(stream, args);
    }
    const int pairs = args.n * args.top_k;
    const int threads = std::min(kSortThreads, std::max(128, (pairs + 31) / 32 * 32));
    cuda::launch(stream, sort_kernel, unsigned(args.n_experts), unsigned(threads), 0, true, sorted,
                 args.experts, pairs, args.n_experts);
    const int mean = pairs / args.n_experts;
    if (mean >= 48 && !stream.is_exact && cuda::has_moe_gemm_sm90(stream)) {
        cuda::moe_gemm_sm90<T>(stream, args);
    } else if (mean < 2) {
        cuda::moe_gemm<T, 8>(stream, args);
    } else if (mean < 6) {
        cuda::moe_gemm<T, 16>(stream, args);
    } else if (mean < 24) {
        cuda::moe_gemm<T, 32>(stream, args);
    } else if (mean < 64) {
        cuda::moe_gemm<T, 64>(stream, args);
    } else {
        cuda::moe_gemm<T, 128>(stream, args);
    }
    const dim3 grid(cuda::ceil_div(args.hs, 8 * kThreads), unsigned(args.n));
    cuda::launch(stream, sum_kernel<T>, grid, kThreads, 0, true, args);
}

bool is_16_byte_aligned(const Tensor &tensor) {
    return reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0;
}

bool is_fast(const Tensor &in, const ExpertMlp &mlp, const MoeBuffers &buffers) {
    const Tensor &gate = mlp.gate->all.bytes, &up = mlp.up->all.bytes, &down = mlp.down->all.bytes;
    const DType dtype = gate.dtype();
    return dtype != LLAISYS_DTYPE_F32 && up.dtype() == dtype && down.dtype() == dtype &&
           in.dtype() == dtype && buffers.gate.dtype() == dtype && buffers.out.dtype() == dtype &&
           mlp.gate->in_features % 8 == 0 && mlp.gate->out_features % 8 == 0 &&
           in.stride(0) % 8 == 0 && is_16_byte_aligned(in) && is_16_byte_aligned(gate) &&
           is_16_byte_aligned(up) && is_16_byte_aligned(down) && is_16_byte_aligned(buffers.gate) &&
           is_16_byte_aligned(buffers.out) && mlp.gate->count <= cuda::kMoeMaxExperts;
}

} // namespace

void moe_route_cuda(const device::Stream &stream, const Tensor &experts, const Tensor &weights,
                    const Tensor &logits, const Tensor *bias, const MoeRouting &routing) {
    const int n = int(logits.size(0));
    const int n_experts = int(logits.size(1));
    require(n_experts <= cuda::kMoeMaxExperts, "moe_route: experts must be at most ",
            cuda::kMoeMaxExperts, " on CUDA, got ", n_experts);
    require(routing.n_groups <= kMaxGroups || routing.n_top_groups == routing.n_groups,
            "moe_route: n_groups must be at most ", kMaxGroups, " on CUDA, got ", routing.n_groups);
    if (n == 0) {
        return;
    }
    const auto kernel = n_experts <= 32    ? route_kernel<1>
                        : n_experts <= 64  ? route_kernel<2>
                        : n_experts <= 128 ? route_kernel<4>
                        : n_experts <= 256 ? route_kernel<8>
                                           : route_kernel<16>;
    cuda::launch(device::cuda_stream_of(stream), kernel, cuda::ceil_div(n, kRouteWarps),
                 unsigned(kRouteWarps * cuda::kWarpSize), 0, true, experts.as<int32_t>(),
                 weights.as<float>(), logits.as<float>(),
                 bias != nullptr ? bias->as<float>() : nullptr, n, n_experts, int(experts.size(1)),
                 routing);
}

void moe_mlp_cuda(const device::Stream &stream, const Tensor &out, bool adds, const Tensor &in,
                  const Tensor &experts, const Tensor &weights, const ExpertMlp &mlp,
                  const MoeBuffers &buffers) {
    device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const int n = int(in.size(0)), top_k = int(experts.size(1));
    const int hs = int(in.size(1)), di = int(mlp.gate->out_features);
    if (!is_fast(in, mlp, buffers)) {
        Reference args{};
        args.x = cuda::reals(in);
        args.gate = cuda::reals(mlp.gate->all.bytes);
        args.up = cuda::reals(mlp.up->all.bytes);
        args.down = cuda::reals(mlp.down->all.bytes);
        args.hidden = cuda::reals(buffers.gate);
        args.out = cuda::reals(out);
        args.gate_bias = cuda::reals(mlp.gate_bias);
        args.up_bias = cuda::reals(mlp.up_bias);
        args.down_bias = cuda::reals(mlp.down_bias);
        args.experts = experts.as<int32_t>();
        args.weights = weights.as<float>();
        args.ldx = in.stride(0);
        args.ldo = out.stride(0);
        args.n = n;
        args.top_k = top_k;
        args.hs = hs;
        args.di = di;
        args.adds = adds;
        args.limit = mlp.limit;
        args.alpha = mlp.alpha;
        return run_reference(cuda_stream, args);
    }
    cuda::dispatch_half(in.dtype(), [&](auto type) {
        using T = decltype(type);
        const auto values = [](const Tensor &tensor) {
            return reinterpret_cast<T *>(tensor.data());
        };
        cuda::MoeArgs<T> args{};
        args.x = values(in);
        args.ldx = in.stride(0);
        args.experts = experts.as<int32_t>();
        args.weights = weights.as<float>();
        args.sorted = buffers.sorted.as<int32_t>();
        args.gate = values(mlp.gate->all.bytes);
        args.up = values(mlp.up->all.bytes);
        args.down = values(mlp.down->all.bytes);
        args.gate_bias = cuda::reals(mlp.gate_bias);
        args.up_bias = cuda::reals(mlp.up_bias);
        args.down_bias = cuda::reals(mlp.down_bias);
        args.hidden = values(buffers.gate);
        args.expert_out = values(buffers.out);
        args.out = cuda::reals(out);
        args.ldo = out.stride(0);
        args.adds = adds;
        args.n = n;
        args.top_k = top_k;
        args.n_experts = int(mlp.gate->count);
        args.hs = hs;
        args.di = di;
        args.limit = mlp.limit;
        args.alpha = mlp.alpha;
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
