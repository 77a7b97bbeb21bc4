// Selects the attention kernel:
//
//   16-bit values, head_dim 64 or 128, at most 16 query heads per KV head
//     runs of query tokens of a sequence  cuda_prefill_wgmma.cuh on compute capability 9.0,
//                                         otherwise cuda_prefill.cuh
//     single query tokens (decode)        cuda_decode.cuh, split-KV when there are few
//     batch-invariant streams             cuda_decode.cuh for every token, with a fixed split
//   everything else (f32, other sizes)    attention_reference_kernel below: one block per token and
//                                         head, one warp per fourth key; for tests
#include "ops/attention/cuda.hpp"

#include "ops/attention/cuda_decode.cuh"
#include "ops/attention/cuda_prefill.cuh"
#include "ops/attention/cuda_prefill_wgmma.cuh"
#include "ops/cuda/dispatch_dtype.cuh"

#include <algorithm>
#include <cmath>
#include <vector>

namespace llaisys::ops {

namespace {

using cuda::AttentionArgs;
using cuda::kWarpSize;

constexpr int64_t kExactTokens = 256; // per launch: bounds the split workspace without clusters
constexpr int kReferenceWarps = 4;
constexpr int kReferenceColumns = 32; // values per lane: head_dim up to 1024

struct Plain {
    cuda::Reals q, k, v, out;
    int64_t d;
    float scale;
};

__global__ void attention_reference_kernel(AttentionArgs args, Plain plain) {
    extern __shared__ float outs[]; // [warp][d]
    __shared__ float max_of[kReferenceWarps], sum_of[kReferenceWarps];
    const int token = blockIdx.x;
    const int head = blockIdx.y;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int64_t d = plain.d;
    const int32_t *table = args.table_of(token);
    const int end = args.end[token];
    float acc[kReferenceColumns] = {};
    float max = -INFINITY;
    float sum = 0;
    for (int e = args.begin[token] + warp; e < end; e += kReferenceWarps) {
        const int64_t at = (args.slot_of(table, e) * args.kv_heads + head / args.group) * d;
        float score = 0;
        for (int64_t i = lane; i < d; i += kWarpSize) {
            score +=
                plain.q.load(token * args.q_token + head * args.q_head + i) * plain.k.load(at + i);
        }
        score = cuda::warp_sum(score) * plain.scale;
        const float now = fmaxf(max, score);
        const float rescale = now == -INFINITY ? 1.0f : expf(max - now);
        const float weight = now == -INFINITY ? 0.0f : expf(score - now);
        sum = sum * rescale + weight;
        max = now;
#pragma unroll
        for (int j = 0; j < kReferenceColumns; ++j) {
            if (lane + j * kWarpSize < d) {
                acc[j] = acc[j] * rescale + weight * plain.v.load(at + lane + j * kWarpSize);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < kReferenceColumns; ++j) {
        if (lane + j * kWarpSize < d) {
            outs[warp * d + lane + j * kWarpSize] = acc[j];
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
    for (int64_t i = threadIdx.x; i < d; i += kReferenceWarps * kWarpSize) {
        float value = 0;
        float total = 0;
        for (int w = 0; w < kReferenceWarps && top != -INFINITY; ++w) {
            const float rescale = expf(max_of[w] - top);
            value += outs[w * d + i] * rescale;
            total += sum_of[w] * rescale;
        }
        plain.out.store(token * args.out_token + head * args.out_head + i,
                        total > 0 ? value / total : 0.0f);
    }
}

void run_plain(const device::CudaStream &stream, const AttentionArgs &args, const Tensor &out,
               const Tensor &q, const Tensor &k, const Tensor &v, float scale) {
    const int64_t d = q.size(2);
    if (d > kReferenceColumns * kWarpSize) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "attention: heads of ", d, " values, at most ",
             kReferenceColumns * kWarpSize, " on this device");
    }
    const Plain plain{cuda::reals(q), cuda::reals(k), cuda::reals(v), cuda::reals(out), d, scale};
    const dim3 grid(unsigned(q.size(0)), unsigned(q.size(1)));
    cuda::launch(stream, attention_reference_kernel, grid, kReferenceWarps * kWarpSize,
                 size_t(kReferenceWarps * d) * sizeof(float), false, args, plain);
}

template <typename T, int D>
void run_prefill(const device::CudaStream &stream, const AttentionArgs &args,
                 const AttentionRuns &runs) {
    const auto kernel = cuda::attention_prefill_kernel<T, D>;
    constexpr auto kBytes = size_t(cuda::prefill_shared_bytes<D>());
    cuda::set_max_dynamic_smem(kernel, kBytes);
    const dim3 grid(cuda::ceil_div(runs.longest, cuda::kPrefillRows / args.group),
                    unsigned(args.kv_heads), unsigned(runs.n_runs));
    cuda::launch(stream, kernel, grid, cuda::kPrefillThreads, kBytes, false, args,
                 runs.runs.as<int32_t>());
}

// n_tokens: of all runs.
template <typename T, int D>
void run_wgmma(const device::CudaStream &stream, const AttentionArgs &args,
               const AttentionRuns &runs, int64_t n_tokens, int64_t n_slots) {
    const auto kernel = cuda::attention_wgmma_kernel<T, D>;
    constexpr auto kBytes = size_t(cuda::wgmma_shared_bytes<D>());
    cuda::set_max_dynamic_smem(kernel, kBytes);
    const int most_blocks =
        cuda::wgmma_grid_limit(runs.n_runs, runs.longest, n_tokens, stream.n_sms);
    const cuda::TileScheduler items =
        cuda::tile_scheduler(args, runs.runs.as<int32_t>(), runs.n_runs, runs.longest, most_blocks);
    cuda::launch(stream, kernel, unsigned(items.n_blocks), cuda::kWgmmaThreads, kBytes, true, args,
                 items, cuda::paged_kv_maps<T, D>(args, n_slots));
}

// Every token as a decode token, independent of its neighbours.
template <typename T, int D>
void run_exact(device::CudaStream &stream, AttentionArgs args, int64_t n) {
    for (int64_t first = 0; first < n; first += kExactTokens) {
        const int64_t count = std::min(kExactTokens, n - first);
        if (args.group <= 8) {
            cuda::run_decode<T, D, 1>(stream, args, nullptr, count);
        } else {
            cuda::run_decode<T, D, 2>(stream, args, nullptr, count);
        }
        args.q = static_cast<const T *>(args.q) + count * args.q_token;
        args.out = static_cast<T *>(args.out) + count * args.out_token;
        args.q_rows += count;
        args.begin += count;
        args.end += count;
    }
}

template <typename T, int D>
void run_singles(device::CudaStream &stream, const AttentionArgs &args, const int32_t *tokens,
                 int64_t n, bool are_long) {
    if (n > 0 && args.group <= 8) {
        cuda::run_decode<T, D, 1>(stream, args, tokens, n, are_long);
    } else if (n > 0) {
        cuda::run_decode<T, D, 2>(stream, args, tokens, n, are_long);
    }
}

template <typename T, int D>
void run_fast(device::CudaStream &stream, const AttentionArgs &args, int64_t n, int64_t n_slots,
              const AttentionRuns &runs) {
    const int32_t *singles = runs.singles.defined() ? runs.singles.as<int32_t>() : nullptr;
    const int64_t n_singles = runs.are_all_single ? n : runs.n_singles;
    // Long sequences come first. They have a launch of their own if it gives them more blocks.
    const int64_t n_long = singles != nullptr && runs.n_long > 0 &&
                                   cuda::decode_clusters(stream, runs.n_long * args.kv_heads) > 1
                               ? std::min(runs.n_long, n_singles)
                               : 0;
    run_singles<T, D>(stream, args, singles, n_long, true);
    run_singles<T, D>(stream, args, n_long > 0 ? singles + n_long : singles, n_singles - n_long,
                      false);
    if (runs.n_runs > 0 && cuda::has_wgmma(stream)) {
        run_wgmma<T, D>(stream, args, runs, n - n_singles, n_slots);
    } else if (runs.n_runs > 0) {
        run_prefill<T, D>(stream, args, runs);
    }
}

template <typename T>
void run_fast(device::CudaStream &stream, const AttentionArgs &args, int64_t n, int64_t d,
              int64_t n_slots, const AttentionRuns &runs) {
    return d == 64 ? run_fast<T, 64>(stream, args, n, n_slots, runs)
                   : run_fast<T, 128>(stream, args, n, n_slots, runs);
}

bool is_16_byte_aligned(const Tensor &tensor) {
    return reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0 && tensor.stride(0) % 8 == 0 &&
           tensor.stride(1) % 8 == 0;
}

// Reads the row indices back to the host when the caller does not provide the runs.
AttentionRuns runs_of(const device::Stream &stream, const AttentionLists &lists, int64_t n) {
    std::vector<int32_t> rows(static_cast<size_t>(n));
    lists.q_rows.store(rows.data(), rows.size() * sizeof(int32_t));
    std::vector<int32_t> runs;
    std::vector<int32_t> singles;
    AttentionRuns result;
    find_attention_runs(rows.data(), n, &runs, &singles, &result);
    const auto upload = [&](const std::vector<int32_t> &values) {
        Tensor tensor = Tensor::create({std::max<int64_t>(1, int64_t(values.size()))},
                                       LLAISYS_DTYPE_I32, stream.type(), stream.device_id());
        tensor.slice(0, 0, int64_t(values.size()))
            .load(values.data(), values.size() * sizeof(int32_t));
        return tensor;
    };
    result.runs = upload(runs);
    result.singles = upload(singles);
    return result;
}

} // namespace

void attention_cuda(const device::Stream &stream, const Tensor &out, const Tensor &q,
                    const KvLayer &kv, const AttentionLists &lists, float scale) {
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
    args.v = kv.v.data();
    args.q_rows = lists.q_rows.as<int32_t>();
    args.begin = lists.begin.as<int32_t>();
    args.end = lists.end.as<int32_t>();
    args.tables = lists.tables.as<int32_t>();
    args.width_at = lists.width.defined() ? lists.width.as<int32_t>() : nullptr;
    args.width = int32_t(lists.tables.size(1));
    args.block_size = lists.block_size;
    args.kv_heads = int32_t(kv.n_heads);
    args.group = int32_t(q.size(1) / kv.n_heads);
    args.are_settled = lists.are_settled;
    args.scale_log2 = scale * 1.4426950408889634f;

    const DType dtype = q.dtype();
    device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const bool is_fast = dtype != LLAISYS_DTYPE_F32 && kv.k.dtype() == dtype &&
                         kv.v.dtype() == dtype && out.dtype() == dtype && (d == 64 || d == 128) &&
                         args.group <= 16 && scale > 0 && is_16_byte_aligned(q) &&
                         is_16_byte_aligned(out);
    if (!is_fast) {
        return run_plain(cuda_stream, args, out, q, kv.k, kv.v, scale);
    }
    if (cuda_stream.is_exact) {
        return cuda::dispatch_half(dtype, [&](auto type) {
            using T = decltype(type);
            d == 64 ? run_exact<T, 64>(cuda_stream, args, n)
                    : run_exact<T, 128>(cuda_stream, args, n);
        });
    }
    const AttentionRuns runs = lists.runs.is_known ? lists.runs : runs_of(stream, lists, n);
    cuda::dispatch_half(dtype, [&](auto type) {
        run_fast<decltype(type)>(cuda_stream, args, n, d, kv.n_slots, runs);
    });
    if (!lists.runs.is_known) {
        stream.synchronize(); // the runs are freed on return
    }
}

} // namespace llaisys::ops
