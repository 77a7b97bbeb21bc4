// adjust_rows and weigh_rows: one block per row, which is read once. Memory-bound for many rows,
// latency-bound for few. Sums have the order of the CPU kernels: 8 lanes over blocks of 512
// weights, one thread per lane, then block by block.
#include "ops/sample_rows/op.hpp"

#include "base/sampling.hpp"
#include "ops/cuda/common.cuh"
#include "ops/sample_rows/cuda_pick.cuh"

#include <cmath>

namespace llaisys::ops {

namespace {

constexpr int kAdjustThreads = 1024;
constexpr int kWeighThreads = 512;
constexpr int kGroups = kWeighThreads / sampling::kLanes; // blocks of weights in parallel
static_assert(kWeighThreads == sampling::kBlock, "a thread a weight while a block is picked from");

struct Adjustments {
    const int32_t *rows, *mask_rows;
    const uint32_t *masks;
    int64_t mask_words;
    const int32_t *bias_offsets, *bias_ids;
    const float *bias_values;
    const int32_t *history_offsets, *history_tokens, *history_sampled;
    const float *penalties;
    const int32_t *pending_rows; // may be null
    const int64_t *sampled;
};

__global__ void __launch_bounds__(kAdjustThreads)
    adjust_rows_kernel(float *out, const float *logits, int64_t vocabulary, Adjustments a) {
    __shared__ bool knows_late;
    cuda::grid_dependency_wait();
    const int r = blockIdx.x;
    const int pending_row = a.pending_rows != nullptr ? a.pending_rows[r] : -1;
    const int late = pending_row >= 0 ? int(a.sampled[pending_row]) : -1;
    knows_late = false;
    const float *from = logits + int64_t(a.rows[r]) * vocabulary;
    float *to = out + int64_t(r) * vocabulary;
    const int mask_row = a.mask_rows[r];
    const uint32_t *mask = mask_row >= 0 ? a.masks + mask_row * a.mask_words : nullptr;
    for (int64_t i = threadIdx.x; i < vocabulary; i += kAdjustThreads) {
        const bool is_allowed = mask == nullptr || (mask[i / 32] >> (i % 32) & 1u) != 0;
        to[i] = is_allowed ? from[i] : -INFINITY;
    }
    __syncthreads();
    const int bias_end = a.bias_offsets[r + 1];
    for (int i = a.bias_offsets[r] + int(threadIdx.x); i < bias_end; i += kAdjustThreads) {
        const int id = a.bias_ids[i];
        if (i > a.bias_offsets[r] && a.bias_ids[i - 1] == id) {
            continue; // the thread of the first duplicate adds them all
        }
        float x = to[id];
        for (int j = i; j < bias_end && a.bias_ids[j] == id; ++j) {
            x = sampling::add(x, a.bias_values[j]);
        }
        to[id] = x;
    }
    __syncthreads();
    const float *numbers = a.penalties + 3 * r;
    const int history_end = a.history_offsets[r + 1];
    for (int i = a.history_offsets[r] + int(threadIdx.x); i < history_end; i += kAdjustThreads) {
        const int id = a.history_tokens[i];
        const int sampled = a.history_sampled[i] + int(id == late);
        if (id == late) {
            knows_late = true;
        }
        to[id] = sampling::penalised(to[id], sampled, numbers[0], numbers[1], numbers[2]);
    }
    __syncthreads();
    if (threadIdx.x == 0 && late >= 0 && !knows_late) {
        to[late] = sampling::penalised(to[late], 1, numbers[0], numbers[1], numbers[2]);
    }
}

struct Weighing {
    const float *logits;
    int64_t vocabulary;
    const float *best;
    int64_t k;
    const int32_t *rows;       // may be null
    const float *temperatures; // may be null
    const double *uniforms;    // null: no pick
    double *sums;
    int32_t *picks;
};

__global__ void __launch_bounds__(kWeighThreads) weigh_rows_kernel(Weighing w) {
    extern __shared__ double block_sums[]; // [n_blocks]
    __shared__ float block[sampling::kBlock];
    __shared__ cuda::Found found;
    cuda::grid_dependency_wait();
    const int r = blockIdx.x;
    const int64_t row = w.rows != nullptr ? w.rows[r] : r;
    const float *x = w.logits + row * w.vocabulary;
    const float max = w.best[row * w.k];
    const float temperature = w.temperatures != nullptr ? w.temperatures[r] : 1.0f;
    if (max == -INFINITY) {
        if (threadIdx.x == 0) {
            w.sums[r] = 0;
            if (w.uniforms != nullptr) {
                w.picks[r] = -1;
            }
        }
        return;
    }
    const int n_blocks = int((w.vocabulary + sampling::kBlock - 1) / sampling::kBlock);
    const int lane = threadIdx.x % sampling::kLanes;
    for (int b = threadIdx.x / sampling::kLanes; b < n_blocks; b += kGroups) {
        const int64_t end = min(w.vocabulary, (b + 1) * sampling::kBlock);
        double sum = 0;
#pragma unroll 8
        for (int64_t i = b * sampling::kBlock + lane; i < end; i += sampling::kLanes) {
            sum += double(sampling::weight_of(x[i], max, temperature));
        }
        sum = cuda::sum_lanes(cuda::own_lanes(), sum);
        if (lane == 0) {
            block_sums[b] = sum;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0;
        for (int b = 0; b < n_blocks; ++b) {
            sum += block_sums[b];
        }
        w.sums[r] = sum;
        if (w.uniforms != nullptr) {
            found = cuda::find_block(block_sums, n_blocks, __dmul_rn(w.uniforms[r], sum));
        }
    }
    if (w.uniforms == nullptr) {
        return;
    }
    __syncthreads();
    const int64_t i = found.begin + threadIdx.x;
    block[threadIdx.x] = i < w.vocabulary ? sampling::weight_of(x[i], max, temperature) : 0.0f;
    __syncthreads();
    if (threadIdx.x == 0) {
        w.picks[r] = int32_t(cuda::find_weight(block, sampling::kBlock, found));
    }
}

} // namespace

void adjust_rows_cuda(const device::Stream &stream, const Tensor &out, const Tensor &logits,
                      const RowAdjustments &adjustments) {
    if (out.size(0) == 0) {
        return;
    }
    const auto integers = [](const Tensor &tensor) { return tensor.as<int32_t>(); };
    const Adjustments a{
        integers(adjustments.rows),
        integers(adjustments.mask_rows),
        reinterpret_cast<const uint32_t *>(integers(adjustments.masks)),
        (logits.size(1) + 31) / 32,
        integers(adjustments.bias_offsets),
        integers(adjustments.bias_ids),
        adjustments.bias_values.as<float>(),
        integers(adjustments.history_offsets),
        integers(adjustments.history_tokens),
        integers(adjustments.history_sampled),
        adjustments.penalties.as<float>(),
        adjustments.pending_rows.defined() ? integers(adjustments.pending_rows) : nullptr,
        adjustments.pending_rows.defined() ? adjustments.sampled.as<int64_t>() : nullptr};
    cuda::launch(device::cuda_stream_of(stream), adjust_rows_kernel, unsigned(out.size(0)),
                 kAdjustThreads, 0, false, out.as<float>(), logits.as<float>(), logits.size(1), a);
}

void weigh_rows_cuda(const device::Stream &stream, const Tensor &sums, const Tensor &picks,
                     const Tensor &logits, const Tensor &best, const Tensor &rows,
                     const Tensor &temperatures, const Tensor &uniforms) {
    if (sums.size(0) == 0) {
        return;
    }
    const Weighing w{logits.as<float>(),
                     logits.size(1),
                     best.as<float>(),
                     best.size(1),
                     rows.defined() ? rows.as<int32_t>() : nullptr,
                     temperatures.defined() ? temperatures.as<float>() : nullptr,
                     uniforms.defined() ? reinterpret_cast<const double *>(uniforms.data())
                                        : nullptr,
                     reinterpret_cast<double *>(sums.data()),
                     uniforms.defined() ? picks.as<int32_t>() : nullptr};
    const size_t n_blocks = size_t((logits.size(1) + sampling::kBlock - 1) / sampling::kBlock);
    cuda::set_max_dynamic_smem(weigh_rows_kernel, n_blocks * sizeof(double));
    cuda::launch(device::cuda_stream_of(stream), weigh_rows_kernel, unsigned(sums.size(0)),
                 kWeighThreads, n_blocks * sizeof(double), false, w);
}

} // namespace llaisys::ops
