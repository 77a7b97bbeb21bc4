// Chooses the attention kernel:
//
//   16-bit values, head size 64 or 128, at most 16 query heads a group
//     runs of tokens of one list        cuda_prefill_wgmma.cuh on compute capability 9.0,
//                                       otherwise cuda_prefill.cuh
//     single tokens                     cuda_decode.cuh, split over the list when there are few
//     exact streams                     cuda_decode.cuh for every token, always split alike
//   everything else (f32, odd sizes)    attention_plain_kernel below: a block for each token and
//                                       head, a warp for every fourth key; for tests
#include "ops/attention/cuda.hpp"

#include "ops/attention/cuda_decode.cuh"
#include "ops/attention/cuda_prefill.cuh"
#include "ops/attention/cuda_prefill_wgmma.cuh"
#include "ops/cuda/visit.cuh"

#include <algorithm>
#include <cmath>
#include <vector>

namespace llaisys::ops {

namespace {

using cuda::AttentionArgs;
using cuda::kWarp;

constexpr int64_t kExactTokens = 256; // at a time: bounds the memory of splits without clusters
constexpr int kPlainWarps = 4;
constexpr int kPlainColumns = 32; // values of a head that a lane keeps: heads of up to 1024

struct Plain {
    cuda::Reals q, k, v, out;
    int64_t d;
    float scale;
};

__global__ void attention_plain_kernel(AttentionArgs args, Plain plain) {
    extern __shared__ float outs[]; // [warp][d]
    __shared__ float max_of[kPlainWarps], sum_of[kPlainWarps];
    const int token = blockIdx.x;
    const int head = blockIdx.y;
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int64_t d = plain.d;
    const int32_t *table = args.table_of(token);
    const int end = args.end[token];
    float acc[kPlainColumns] = {};
    float max = -INFINITY;
    float sum = 0;
    for (int e = args.begin[token] + warp; e < end; e += kPlainWarps) {
        const int64_t at = (args.slot_of(table, e) * args.kv_heads + head / args.group) * d;
        float score = 0;
        for (int64_t i = lane; i < d; i += kWarp) {
            score +=
                plain.q.load(token * args.q_token + head * args.q_head + i) * plain.k.load(at + i);
        }
        score = cuda::warp_sum(score) * plain.scale;
        const float now = fmaxf(max, score);
        const float fade = now == -INFINITY ? 1.0f : expf(max - now);
        const float weight = now == -INFINITY ? 0.0f : expf(score - now);
        sum = sum * fade + weight;
        max = now;
#pragma unroll
        for (int j = 0; j < kPlainColumns; ++j) {
            if (lane + j * kWarp < d) {
                acc[j] = acc[j] * fade + weight * plain.v.load(at + lane + j * kWarp);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < kPlainColumns; ++j) {
        if (lane + j * kWarp < d) {
            outs[warp * d + lane + j * kWarp] = acc[j];
        }
    }
    if (lane == 0) {
        max_of[warp] = max;
        sum_of[warp] = sum;
    }
    __syncthreads();
    float top = -INFINITY;
    for (int w = 0; w < kPlainWarps; ++w) {
        top = fmaxf(top, max_of[w]);
    }
    for (int64_t i = threadIdx.x; i < d; i += kPlainWarps * kWarp) {
        float value = 0;
        float total = 0;
        for (int w = 0; w < kPlainWarps && top != -INFINITY; ++w) {
            const float fade = expf(max_of[w] - top);
            value += outs[w * d + i] * fade;
            total += sum_of[w] * fade;
        }
        plain.out.store(token * args.out_token + head * args.out_head + i,
                        total > 0 ? value / total : 0.0f);
    }
}

void run_plain(const device::CudaStream &stream, const AttentionArgs &args, const Tensor &out,
               const Tensor &q, const Tensor &k, const Tensor &v, float scale) {
    const int64_t d = q.size(2);
    if (d > kPlainColumns * kWarp) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "attention: heads of ", d, " values, at most ",
             kPlainColumns * kWarp, " on this device");
    }
    const Plain plain{cuda::reals(q), cuda::reals(k), cuda::reals(v), cuda::reals(out), d, scale};
    const dim3 grid(unsigned(q.size(0)), unsigned(q.size(1)));
    cuda::launch(stream, attention_plain_kernel, grid, kPlainWarps * kWarp,
                 size_t(kPlainWarps * d) * sizeof(float), false, args, plain);
}

template <typename T, int D>
void run_prefill(const device::CudaStream &stream, const AttentionArgs &args,
                 const AttentionRuns &runs) {
    const auto kernel = cuda::attention_prefill_kernel<T, D>;
    constexpr auto kBytes = size_t(cuda::prefill_shared_bytes<D>());
    cuda::allow_shared(kernel, kBytes);
    const dim3 grid(cuda::blocks_for(runs.longest, cuda::kPrefillRows / args.group),
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
    cuda::allow_shared(kernel, kBytes);
    const int most_blocks =
        cuda::wgmma_most_blocks(runs.n_runs, runs.longest, n_tokens, stream.n_processors);
    const cuda::WgmmaItems items =
        cuda::wgmma_items(args, runs.runs.as<int32_t>(), runs.n_runs, runs.longest, most_blocks);
    cuda::launch(stream, kernel, unsigned(items.n_blocks), cuda::kWgmmaThreads, kBytes, true, args,
                 items, cuda::wgmma_pages<T, D>(args, n_slots));
}

// Every token by itself, whatever stands beside it.
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
void run_fast(device::CudaStream &stream, const AttentionArgs &args, int64_t n, int64_t n_slots,
              const AttentionRuns &runs) {
    const int32_t *singles = runs.singles.defined() ? runs.singles.as<int32_t>() : nullptr;
    const int64_t n_singles = runs.are_all_single ? n : runs.n_singles;
    if (n_singles > 0 && args.group <= 8) {
        cuda::run_decode<T, D, 1>(stream, args, singles, n_singles);
    } else if (n_singles > 0) {
        cuda::run_decode<T, D, 2>(stream, args, singles, n_singles);
    }
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

bool lies_on_16_bytes(const Tensor &tensor) {
    return reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0 && tensor.stride(0) % 8 == 0 &&
           tensor.stride(1) % 8 == 0;
}

// For a caller who has not said which tokens stand together: reads the lists back.
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
                         args.group <= 16 && scale > 0 && lies_on_16_bytes(q) &&
                         lies_on_16_bytes(out);
    if (!is_fast) {
        return run_plain(cuda_stream, args, out, q, kv.k, kv.v, scale);
    }
    if (cuda_stream.is_exact) {
        return cuda::visit_half(dtype, [&](auto type) {
            using T = decltype(type);
            d == 64 ? run_exact<T, 64>(cuda_stream, args, n)
                    : run_exact<T, 128>(cuda_stream, args, n);
        });
    }
    const AttentionRuns runs = lists.runs.is_known ? lists.runs : runs_of(stream, lists, n);
    cuda::visit_half(dtype, [&](auto type) {
        run_fast<decltype(type)>(cuda_stream, args, n, d, kv.n_slots, runs);
    });
    if (!lists.runs.is_known) {
        stream.synchronize(); // the runs are ours
    }
}

} // namespace llaisys::ops
