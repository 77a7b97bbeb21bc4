// Selects the attention kernel:
//
//  16-bit values, head_dim 64, 80, 96, 112, 128, 192 or 256, at most 16 query heads per KV head
//    runs of query tokens of a sequence  cuda_prefill_wgmma.cuh for head_dim 64 and 128 on compute
//                                        capability 9.0, otherwise cuda_prefill.cuh
//    single query tokens (decode)        cuda_decode.cuh, split-KV when there are few or they are
//                                        long
//    batch-invariant streams             cuda_decode.cuh for every token, with a fixed split
//  8-bit caches of the same sizes        cuda_bytes.cuh
//  keys of 576 that contain values of    cuda_latent.cuh
//  512, 16 bits, one KV head, no sinks
//  everything else (f32, other sizes)    attention_reference_kernel below: one block per token and
//                                        head, one warp per fourth key
#include "ops/attention/op.hpp"

#include "ops/attention/cuda_bytes.cuh"
#include "ops/attention/cuda_launch.cuh"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

namespace llaisys::ops {

namespace {

using cuda::AttentionArgs;
using cuda::has_aligned_rows;
using cuda::kWarpSize;
using cuda::LaunchAttention;

constexpr int kReferenceWarps = 4;
constexpr int kReferenceColumns = 32; // values per lane: head_dim up to 1024

// A cache of any dtype.
struct ReferenceCache {
    cuda::Reals reals; // data null: 8 bits
    cuda::KvBytes bytes;

    __device__ __forceinline__ float scale(int64_t slot, int head) const {
        return reals.data != nullptr ? 1.0f : bytes.scale(slot, head);
    }
    __device__ __forceinline__ float load(int64_t i) const {
        return reals.data != nullptr ? reals.load(i) : bytes.value(i);
    }
};

ReferenceCache reference_cache(const Tensor &cache) {
    return is_eight_bits(cache.dtype())
               ? ReferenceCache{cuda::reals(nullptr), cuda::kv_bytes(cache)}
               : ReferenceCache{cuda::reals(cache), {}};
}

struct ReferenceArgs {
    cuda::Reals q, out;
    ReferenceCache k, v;
    int64_t d, value_dim;
    float scale;
    float soft_cap; // 0: none
};

__global__ void attention_reference_kernel(AttentionArgs args, ReferenceArgs reference) {
    extern __shared__ float outs[]; // [warp][value_dim]
    __shared__ float max_of[kReferenceWarps], sum_of[kReferenceWarps];
    const int token = blockIdx.x;
    const int head = blockIdx.y;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int64_t d = reference.d;
    const int64_t value_dim = reference.value_dim;
    const int32_t *table = args.table_of(token);
    const int end = args.end[token];
    float acc[kReferenceColumns] = {};
    float max = -INFINITY;
    float sum = 0;
    for (int e = args.begin[token] + warp; e < end; e += kReferenceWarps) {
        const int64_t slot = args.slot_of(table, e);
        const int kv_head = head / args.group;
        const int64_t at = (slot * args.kv_heads + kv_head) * d;
        float score = 0;
        for (int64_t i = lane; i < d; i += kWarpSize) {
            score += reference.q.load(token * args.q_token + head * args.q_head + i) *
                     reference.k.load(at + i);
        }
        score = cuda::warp_sum(score) * reference.k.scale(slot, kv_head) * reference.scale;
        const float value_scale = reference.v.scale(slot, kv_head);
        if (reference.soft_cap != 0) {
            score = reference.soft_cap * tanhf(score / reference.soft_cap);
        }
        const float now = fmaxf(max, score);
        const float rescale = now == -INFINITY ? 1.0f : expf(max - now);
        const float weight = now == -INFINITY ? 0.0f : expf(score - now);
        sum = sum * rescale + weight;
        max = now;
#pragma unroll
        for (int j = 0; j < kReferenceColumns; ++j) {
            if (lane + j * kWarpSize < value_dim) {
                acc[j] = acc[j] * rescale +
                         weight * (value_scale * reference.v.load(at + lane + j * kWarpSize));
            }
        }
    }
#pragma unroll
    for (int j = 0; j < kReferenceColumns; ++j) {
        if (lane + j * kWarpSize < value_dim) {
            outs[warp * value_dim + lane + j * kWarpSize] = acc[j];
        }
    }
    if (lane == 0) {
        max_of[warp] = max;
        sum_of[warp] = sum;
    }
    __syncthreads();
    float top = -INFINITY;
    for (int w = 0; w < kReferenceWarps; ++w) {
        top = fmaxf(top, max_of[w]);
    }
    for (int64_t i = threadIdx.x; i < value_dim; i += kReferenceWarps * kWarpSize) {
        float value = 0;
        float total = 0;
        for (int w = 0; w < kReferenceWarps && top != -INFINITY; ++w) {
            const float rescale = expf(max_of[w] - top);
            value += outs[w * value_dim + i] * rescale;
            total += sum_of[w] * rescale;
        }
        if (args.sinks != nullptr) {
            total += expf(args.sinks[head] - top);
        }
        reference.out.store(token * args.out_token + head * args.out_head + i,
                            total > 0 ? value / total : 0.0f);
    }
}

void run_reference(const device::CudaStream &stream, const AttentionArgs &args, const Tensor &out,
                   const Tensor &q, const KvLayer &kv, float scale, float soft_cap) {
    const int64_t d = q.size(2);
    if (d > kReferenceColumns * kWarpSize) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "attention: heads of ", d, " values, at most ",
             kReferenceColumns * kWarpSize, " on this device");
    }
    const ReferenceArgs reference{cuda::reals(q),
                                  cuda::reals(out),
                                  reference_cache(kv.k),
                                  reference_cache(kv.values()),
                                  d,
                                  kv.value_dim,
                                  scale,
                                  soft_cap};
    const dim3 grid(unsigned(q.size(0)), unsigned(q.size(1)));
    cuda::launch(stream, attention_reference_kernel, grid, kReferenceWarps * kWarpSize,
                 size_t(kReferenceWarps * kv.value_dim) * sizeof(float), false, args, reference);
}

// A call for the kernels in 16 bits.
struct MmaCall {
    const device::CudaStream &stream;
    const AttentionArgs &args;
    const KvLayer &kv;
    int64_t head_dim;
};

bool is_latent(const MmaCall &call) {
    return !call.kv.has_values() && call.kv.n_heads == 1 && call.args.cap_scale == 0 &&
           call.args.sinks == nullptr && call.head_dim == cuda::kLatentDim &&
           call.kv.value_dim == cuda::kLatentValues && cuda::has_latent_attention(call.stream);
}

template <int D> bool has_head_dim(const MmaCall &call) {
    const bool is_large = D != 64 && D != 128;
    return call.head_dim == D && call.kv.value_dim == D && call.args.group <= 16 &&
           (!is_large || call.stream.max_shared_bytes >= cuda::kLargeHeadSmem);
}

// The first backend that supports a call is used; without one, the reference kernel.
constexpr struct {
    bool (*supports)(const MmaCall &call);
    LaunchAttention launch;
} kBackends[] = {
    {is_latent, cuda::launch_latent_attention},
    {has_head_dim<64>, cuda::launch_attention<64>},
    {has_head_dim<80>, cuda::launch_attention<80>},
    {has_head_dim<96>, cuda::launch_attention<96>},
    {has_head_dim<112>, cuda::launch_attention<112>},
    {has_head_dim<128>, cuda::launch_attention<128>},
    {has_head_dim<192>, cuda::launch_attention<192>},
    {has_head_dim<256>, cuda::launch_attention<256>},
};

// Reads the row indices back to the host when the caller does not provide the runs.
AttentionRuns runs_of(const device::Stream &stream, const AttentionLists &lists, int64_t n) {
    std::vector<int32_t> rows(static_cast<size_t>(n));
    lists.q_rows.store(rows.data(), rows.size() * sizeof(int32_t));
    std::vector<int32_t> ends(rows.size());
    lists.end.store(ends.data(), ends.size() * sizeof(int32_t));
    std::vector<int32_t> runs;
    std::vector<int32_t> singles;
    std::vector<int32_t> extents;
    AttentionRuns result;
    find_attention_runs(rows.data(), n, &runs, &singles, &result);
    result.n_copied = find_run_extents(ends.data(), runs, &extents);
    const auto upload = [&](const std::vector<int32_t> &values) {
        Tensor tensor = Tensor::create({std::max<int64_t>(1, int64_t(values.size()))},
                                       LLAISYS_DTYPE_I32, stream.type(), stream.device_id());
        tensor.slice(0, 0, int64_t(values.size()))
            .load(values.data(), values.size() * sizeof(int32_t));
        return tensor;
    };
    result.runs = upload(runs);
    result.singles = upload(singles);
    result.extents = upload(extents);
    return result;
}

} // namespace

void attention_cuda(const device::Stream &stream, const Tensor &out, const Tensor &q,
                    const KvLayer &kv, const AttentionLists &lists, float scale, float soft_cap,
                    const Tensor *sinks) {
    const int64_t n = q.size(0);
    const int64_t d = q.size(2);
    if (q.elements() == 0) {
        return;
    }
    AttentionArgs args{};
    args.q = q.data();
    args.q_token = q.stride(0);
    args.q_head = q.stride(1);
    args.out = out.data();
    args.out_token = out.stride(0);
    args.out_head = out.stride(1);
    args.k = kv.k.data();
    args.v = kv.values().data();
    const bool is_bytes = is_eight_bits(kv.k.dtype());
    if (is_bytes) {
        args.k_scales = cuda::kv_bytes(kv.k).aligned_scales();
        args.v_scales = cuda::kv_bytes(kv.v).aligned_scales();
        args.n_slots = kv.n_slots;
    }
    args.q_rows = lists.q_rows.as<int32_t>();
    args.begin = lists.begin.as<int32_t>();
    args.end = lists.end.as<int32_t>();
    args.tables = lists.tables.as<int32_t>();
    args.width_at = lists.width.defined() ? lists.width.as<int32_t>() : nullptr;
    args.width = int32_t(lists.tables.size(1));
    args.block_size = lists.block_size;
    args.block_shift = cuda::block_shift_of(lists.block_size);
    args.kv_heads = int32_t(kv.n_heads);
    args.group = int32_t(q.size(1) / kv.n_heads);
    args.are_settled = lists.are_settled;
    args.scale_log2 = (soft_cap != 0 ? soft_cap : scale) * 1.4426950408889634f;
    args.cap_scale = soft_cap != 0 ? scale / soft_cap : 0.0f;
    args.sinks = sinks != nullptr ? sinks->as<float>() : nullptr;

    const DType dtype = q.dtype();
    device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const bool has_cache = is_bytes ? args.group <= cuda::max_byte_group(d)
                                    : kv.k.dtype() == dtype && kv.values().dtype() == dtype;
    const bool has_mma = dtype != LLAISYS_DTYPE_F32 && has_cache && out.dtype() == dtype &&
                         scale > 0 && has_aligned_rows(q) && has_aligned_rows(out);
    const MmaCall call{cuda_stream, args, kv, d};
    const auto *const backend =
        std::find_if(std::begin(kBackends), std::end(kBackends),
                     [&](const auto &candidate) { return candidate.supports(call); });
    if (!has_mma || backend == std::end(kBackends)) {
        return run_reference(cuda_stream, args, out, q, kv, scale, soft_cap);
    }
    const LaunchAttention launch = backend->launch;
    const cuda::AttentionLaunch all{cuda_stream, args, dtype, n, kv.n_slots, nullptr};
    if (cuda_stream.is_exact) {
        return is_bytes ? cuda::attention_bytes(all, kv, lists, nullptr, launch) : launch(all);
    }
    const AttentionRuns runs = lists.runs.is_known ? lists.runs : runs_of(stream, lists, n);
    if (is_bytes) {
        cuda::attention_bytes(all, kv, lists, &runs, launch);
    } else {
        launch({cuda_stream, args, dtype, n, kv.n_slots, &runs});
    }
    if (!lists.runs.is_known) {
        stream.synchronize(); // the runs are freed on return
    }
}

} // namespace llaisys::ops
