// sample_rows: one block per row, one thread per candidate; a few microseconds for any number of
// rows. rank_rows: one block per row, which is read only for a token that is not one of the best.
#include "ops/sample_rows/op.hpp"

#include "ops/cuda/common.cuh"
#include "ops/sample_rows/cuda_pick.cuh"
#include "ops/sample_rows/cuda_sample.cuh"

#include <climits>
#include <cmath>

namespace llaisys::ops {

namespace {

constexpr int kThreads = int(kMaxTopK);
constexpr int kRankThreads = 512;

// Remaining candidates of a row, in shared memory.
struct Left {
    float weights[kMaxTopK]; // best first; 0: removed
    float sorted[kMaxTopK];  // of the remaining candidates, in id order
    int32_t ids[kMaxTopK];   // INT_MAX: removed
    int32_t sorted_ids[kMaxTopK];
    double sum;
    int n_kept;
    bool is_enough;
};

// Candidate of a thread.
struct Own {
    float x;
    int32_t id;
    bool is_left;
};

// Fills weights, sorted and sum; synchronizes the block before and after. n: remaining
// candidates.
__device__ void weigh(Left *left, const Own &own, int n, float max, float temperature) {
    const int i = threadIdx.x;
    const float weight = own.is_left ? sampling::weight_of(own.x, max, temperature) : 0.0f;
    left->weights[i] = weight;
    left->ids[i] = own.is_left ? own.id : INT_MAX;
    __syncthreads();
    if (own.is_left) {
        int rank = 0;
#pragma unroll 8
        for (int j = 0; j < kThreads; ++j) {
            rank += int(left->ids[j] < own.id);
        }
        left->sorted[rank] = weight;
        left->sorted_ids[rank] = own.id;
    }
    __syncthreads();
    if (i < sampling::kLanes) {
        double sum = 0;
        for (int j = i; j < n; j += sampling::kLanes) {
            sum += double(left->sorted[j]);
        }
        sum = cuda::sum_lanes(0xffu, sum);
        if (i == 0) {
            left->sum = sum;
        }
    }
    __syncthreads();
}

// Number of threads below this one with `says` set.
__device__ int count_below(bool says) {
    __shared__ int counts[kThreads / cuda::kWarpSize];
    const unsigned voices = __ballot_sync(cuda::kFullMask, says);
    const int warp = threadIdx.x / cuda::kWarpSize;
    if (threadIdx.x % cuda::kWarpSize == 0) {
        counts[warp] = __popc(voices);
    }
    __syncthreads();
    int below = __popc(voices & ((1u << threadIdx.x % cuda::kWarpSize) - 1));
    for (int w = 0; w < warp; ++w) {
        below += counts[w];
    }
    __syncthreads();
    return below;
}

// One thread. As keep_top_p of runner/sampler_chain.cpp, over the candidates above -inf; removed
// candidates have weight 0.
__device__ void walk_down(Left *left, const float *best, int k, double wanted) {
    double sum = 0;
    int n_kept = 0;
    int last = -1;
    for (int j = 0; j < k; ++j) {
        if (left->ids[j] == INT_MAX || !(best[j] > -INFINITY)) {
            continue;
        }
        if (n_kept > 0 && sum >= wanted) {
            break;
        }
        sum += double(left->weights[j]);
        ++n_kept;
        last = j;
    }
    left->is_enough = sum >= wanted || n_kept < kThreads;
    left->n_kept = last + 1; // prefix length, removed candidates included
}

__global__ void __launch_bounds__(kThreads) sample_rows_kernel(cuda::Sampling d) {
    __shared__ Left left;
    cuda::grid_dependency_wait();
    const int r = blockIdx.x;
    const int i = threadIdx.x;
    const int64_t at = int64_t(d.rows != nullptr ? d.rows[r] : r) * d.k;
    const float *best = d.best + at;
    Own own{i < d.k ? best[i] : -INFINITY, i < d.k ? d.best_ids[at + i] : INT_MAX, false};
    const bool is_possible = own.x > -INFINITY;
    const int n_above = __syncthreads_count(is_possible);
    const auto kind = SampleKind(d.kinds[r]);
    const auto tell = [&](int64_t id, bool is_open) {
        if (i == 0) {
            d.is_open[r] = int(is_open);
            d.ids[r] = is_open ? int64_t(d.best_ids[at]) : id;
        }
    };
    if (n_above == 0 || kind != SampleKind::cut) {
        const int64_t id = kind == SampleKind::pick ? d.picks[r] : d.best_ids[at];
        return tell(id, n_above == 0 || id < 0);
    }
    const int first = d.processor_offsets[r];
    const int end = d.processor_offsets[r + 1];
    const float max = best[0];
    float temperature = d.temperatures[r];
    const auto first_processor = LogitsProcessorKind(d.processors[first]);
    const bool cuts_nothing = first_processor == LogitsProcessorKind::top_k &&
                              d.processor_values[first] >= float(d.vocabulary);
    own.is_left = cuts_nothing ? i < d.k : is_possible;
    if (first_processor == LogitsProcessorKind::min_p && n_above == d.k && d.k < d.vocabulary) {
        const float last = sampling::weight_of(best[d.k - 1], max, temperature);
        if (!(double(last) < double(d.processor_values[first]) * (1 - 1e-6))) {
            return tell(0, true);
        }
    }
    int n = __syncthreads_count(own.is_left);
    for (int processor = first; processor < end && n > 1; ++processor) {
        const float value = d.processor_values[processor];
        switch (LogitsProcessorKind(d.processors[processor])) {
        case LogitsProcessorKind::temperature:
            temperature = value;
            break;
        case LogitsProcessorKind::top_k:
            if (int(value) < n) {
                own.is_left = own.is_left && is_possible;
                own.is_left = count_below(own.is_left) < int(value) && own.is_left;
            }
            break;
        case LogitsProcessorKind::min_p:
            own.is_left = own.is_left && sampling::weight_of(own.x, max, temperature) >= value;
            break;
        case LogitsProcessorKind::top_p:
            weigh(&left, own, n, max, temperature);
            if (i == 0) {
                const double all = processor == first ? d.sums[r] : left.sum;
                walk_down(&left, best, d.k, __dmul_rn(double(value), all));
            }
            __syncthreads();
            if (!left.is_enough) {
                return tell(0, true);
            }
            own.is_left = own.is_left && is_possible && i < left.n_kept;
            break;
        }
        n = __syncthreads_count(own.is_left);
    }
    if (n <= 1) { // the best candidate always remains
        return tell(d.best_ids[at], false);
    }
    weigh(&left, own, n, max, temperature);
    if (i == 0) {
        const double target = __dmul_rn(d.uniforms[r], left.sum);
        const cuda::Found found = cuda::find_block(&left.sum, 1, target);
        tell(left.sorted_ids[cuda::find_weight(left.sorted, n, found)], false);
    }
}

struct Ranking {
    float *sampled_logits;
    int32_t *ranks, *top_ids;
    float *tops;
    int m;
    const int64_t *ids;
    const float *logits;
    int64_t vocabulary;
    const int32_t *rows, *best_ids;
    const float *best;
    int k;
};

__global__ void __launch_bounds__(kRankThreads) rank_rows_kernel(Ranking k) {
    __shared__ int counts[kRankThreads / cuda::kWarpSize];
    __shared__ int rank_of_best; // 0: not one of the k best
    cuda::grid_dependency_wait();
    const int64_t r = blockIdx.x;
    const int64_t from = k.rows[r];
    const float *row = k.logits + from * k.vocabulary;
    const int64_t id = k.ids[r];
    const float x = row[id];
    if (threadIdx.x == 0) {
        rank_of_best = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < k.k; i += kRankThreads) {
        const int32_t best = k.best_ids[from * k.k + i];
        if (i < k.m) {
            k.top_ids[r * k.m + i] = best;
            k.tops[r * k.m + i] = k.best[from * k.k + i];
        }
        if (best == id) {
            rank_of_best = i + 1;
        }
    }
    __syncthreads();
    if (rank_of_best > 0 && x > -INFINITY) { // a NaN would be listed as -inf
        if (threadIdx.x == 0) {
            k.sampled_logits[r] = x;
            k.ranks[r] = rank_of_best;
        }
        return;
    }
    int before = 0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < k.vocabulary; i += kRankThreads) {
        before += int(row[i] > x || (row[i] == x && i < id));
    }
    for (int step = cuda::kWarpSize / 2; step > 0; step /= 2) {
        before += __shfl_xor_sync(cuda::kFullMask, before, step);
    }
    if (threadIdx.x % cuda::kWarpSize == 0) {
        counts[threadIdx.x / cuda::kWarpSize] = before;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int rank = 1;
        for (const int count : counts) {
            rank += count;
        }
        k.sampled_logits[r] = x;
        k.ranks[r] = rank;
    }
}

} // namespace

void sample_rows_cuda(const device::Stream &stream, const Tensor &ids, const Tensor &is_open,
                      const Tensor &logits, const Tensor &best_ids, const Tensor &best,
                      const Tensor &sums, const Tensor &picks, const RowSampling &samples) {
    if (ids.size(0) == 0) {
        return;
    }
    const auto doubles = [](const Tensor &tensor) {
        return reinterpret_cast<const double *>(tensor.data());
    };
    const cuda::Sampling d{ids.as<int64_t>(),
                           is_open.as<int32_t>(),
                           best_ids.as<int32_t>(),
                           best.as<float>(),
                           int(best.size(1)),
                           logits.as<float>(),
                           logits.size(1),
                           doubles(sums),
                           picks.as<int32_t>(),
                           samples.rows.defined() ? samples.rows.as<int32_t>() : nullptr,
                           samples.kinds.as<int32_t>(),
                           samples.temperatures.as<float>(),
                           doubles(samples.uniforms),
                           samples.processor_offsets.as<int32_t>(),
                           samples.processors.as<int32_t>(),
                           samples.processor_values.as<float>()};
    cuda::launch(device::cuda_stream_of(stream), sample_rows_kernel, unsigned(ids.size(0)),
                 kThreads, 0, false, d);
    if (samples.may_be_wide) {
        cuda::sample_wide_rows(device::cuda_stream_of(stream), d, ids.size(0));
    }
}

void rank_rows_cuda(const device::Stream &stream, const RowRanks &out, const Tensor &ids,
                    const Tensor &logits, const Tensor &rows, const Tensor &best_ids,
                    const Tensor &best) {
    if (ids.size(0) == 0) {
        return;
    }
    const Ranking ranking{
        out.logits.as<float>(), out.ranks.as<int32_t>(), out.top_ids.as<int32_t>(),
        out.tops.as<float>(),   int(out.tops.size(1)),   ids.as<int64_t>(),
        logits.as<float>(),     logits.size(1),          rows.as<int32_t>(),
        best_ids.as<int32_t>(), best.as<float>(),        int(best.size(1))};
    cuda::launch(device::cuda_stream_of(stream), rank_rows_kernel, unsigned(ids.size(0)),
                 kRankThreads, 0, false, ranking);
}

} // namespace llaisys::ops
