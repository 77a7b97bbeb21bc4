// sample_rows of rows that the best candidates do not decide: top_p or min_p keep more. One block
// per row; blocks of decided rows exit at once.
//
// top_p: the cutoff is found by histograms of weights, first over the bins of find_cutoff
// (runner/sampler_math.cpp), then over the order-preserving keys of the logits of one bin. The weights
// of a bin differ by less than a factor of 2, so that their integer sums are exact in any order.
// Then the kept weights are compacted chunk by chunk, summed in the order of the host sampler, and
// one is picked.
//
// Four to six passes over a row. Bound: instructions for weights and, with many rows, DRAM.
#include "ops/sample_rows/cuda_sample.cuh"

#include "base/sampling.hpp"
#include "ops/cuda/common.cuh"
#include "ops/cuda/row_values.cuh"
#include "ops/sample_rows/cuda_pick.cuh"

#include <climits>
#include <cmath>

namespace llaisys::ops::cuda {

namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kBins = sampling::kCutoffBins;
constexpr int kPerThread = 4;
constexpr int kChunk = kPerThread * kThreads;
constexpr int kLowBits = 13; // of a weight of up to 25 bits; 2^18 of them fit 32 bits

// Kept logits: those above the key of the cutoff and the first n_ties equal to it, with a weight of
// at least `floor`.
struct Kept {
    uint32_t key = 0;
    int n_ties = 0;
    float floor = 0;
    float floor_temperature = 1;
};

struct Shared {
    uint32_t low[kBins], high[kBins];
    double mass[kBins];
    float staged[sampling::kBlock + kChunk]; // kept weights that no block sum includes yet
    int32_t staged_ids[sampling::kBlock];    // of the block that is picked from
    int above[kPerThread * kWarps], ties[kPerThread * kWarps]; // kept before each warp
    int chunk_above, chunk_ties;
    double target;
    int bin;
    Found found;
};

// Exponent of the smallest weight of a bin, or less.
__device__ __forceinline__ int exponent_of(int bin) {
    return int(floorf(-0.0450842201f * float(bin + 1) - 0.001f)); // log2(e) / 32
}

struct Row {
    const float *x;
    int64_t n;
    float max, temperature;

    __device__ __forceinline__ float weight(float logit, float at) const {
        return sampling::weight_of(logit, max, at);
    }
    __device__ __forceinline__ int bin(float logit) const {
        return sampling::cutoff_bin(logit, max, temperature);
    }
};

// Histogram of the exact weights of logits for which index_of(logit, bin) is not negative, and the
// index at which their sum, from 0 on, reaches shared->target; the target becomes what is left of it
// there. False if it is not reached. exponent_bin: bin of all logits; negative: that of the index.
template <typename IndexOf>
__device__ bool find_index(Shared *shared, const Row &row, int exponent_bin,
                           const IndexOf &index_of) {
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
        shared->low[i] = shared->high[i] = 0;
    }
    __syncthreads();
    for_each_value<kThreads>(row.x, row.n, 1, [&](float logit, int64_t) {
        if (!(logit > -INFINITY)) {
            return;
        }
        const int bin = row.bin(logit);
        const int index = index_of(logit, bin);
        const float weight = index >= 0 ? row.weight(logit, row.temperature) : 0.0f;
        if (weight > 0) {
            const uint32_t bits = __float_as_uint(weight);
            const uint32_t value = ((bits & 0x7fffffu) | 0x800000u)
                                   << (int(bits >> 23) - 127 - exponent_of(bin));
            atomicAdd(shared->low + index, value & ((1u << kLowBits) - 1));
            atomicAdd(shared->high + index, value >> kLowBits);
        }
    });
    __syncthreads();
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
        const double sum = double(shared->high[i]) * double(1 << kLowBits) + double(shared->low[i]);
        const int exponent = exponent_of(exponent_bin < 0 ? i : exponent_bin) - 23;
        shared->mass[i] = sum * __longlong_as_double((long long)(exponent + 1023) << 52);
    }
    __syncthreads();
    if (threadIdx.x == 0) { // in the order of find_cutoff
        double target = shared->target;
        shared->bin = -1;
        double before = 0;
        for (int i = 0; i < kBins; ++i) {
            const double mass = shared->mass[i];
            if (mass > 0) {
                target -= before;
                before = mass;
                if (mass >= target) {
                    shared->bin = i;
                    break;
                }
            }
        }
        shared->target = target;
    }
    __syncthreads();
    return shared->bin >= 0;
}

// Cutoff of top_p; shared->target: the weight that is to be reached. False if it is not found.
__device__ bool find_cutoff(Shared *shared, const Row &row, Kept *kept) {
    // The last bin is no bin of similar weights; top_p below 1 does not reach it.
    if (!find_index(shared, row, -1, [](float, int bin) { return bin < kBins - 1 ? bin : -1; })) {
        return false;
    }
    const int own = shared->bin;
    // Values of the bin, and more than rounding could add.
    const float margin = (fabsf(row.max) + float(own + 1) / 32 * row.temperature) * 1e-6f;
    const float top = row.max - float(own) / 32 * row.temperature;
    uint32_t high = key_of(own == 0 ? row.max : top + margin);
    uint32_t low = key_of(row.max - float(own + 1) / 32 * row.temperature - margin);
    low = own == 0 && row.max == INFINITY ? high : low;
    while (low < high) {
        const int bits = 32 - __clz(high - low);
        const int shift = max(0, bits - 10);
        if (!find_index(shared, row, own, [&](float logit, int bin) {
                const uint32_t key = key_of(logit);
                return bin == own && key >= low && key <= high ? int((high - key) >> shift) : -1;
            })) {
            return false;
        }
        high -= uint32_t(shared->bin) << shift;
        low = max(low, high - min(high, (1u << shift) - 1));
    }
    const double weight = double(row.weight(value_of(high), row.temperature));
    double ties = ceil(shared->target / weight);
    ties += ties * weight < shared->target ? 1 : 0;
    ties -= (ties - 1) * weight >= shared->target ? 1 : 0;
    kept->key = high;
    kept->n_ties = int(fmin(fmax(ties, 1.0), double(INT_MAX)));
    return true;
}

// Kept logits of a chunk in the order of ids; store(position, weight, id). n_above and n_ties: of the
// chunks before, updated.
template <typename Store>
__device__ __forceinline__ void compact(Shared *shared, const Row &row, const Kept &kept,
                                        float temperature, int64_t begin, int *n_above, int *n_ties,
                                        const Store &store) {
    const int warp = threadIdx.x / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    float logits[kPerThread];
    unsigned above[kPerThread], ties[kPerThread];
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
        const int64_t i = begin + j * kThreads + threadIdx.x;
        logits[j] = i < row.n ? row.x[i] : -INFINITY;
        const bool is_heavy =
            logits[j] > -INFINITY && row.weight(logits[j], kept.floor_temperature) >= kept.floor;
        const uint32_t key = key_of(logits[j]);
        above[j] = __ballot_sync(kFullMask, is_heavy && key > kept.key);
        ties[j] = __ballot_sync(kFullMask, is_heavy && key == kept.key);
        if (lane == 0) {
            shared->above[j * kWarps + warp] = __popc(above[j]);
            shared->ties[j * kWarps + warp] = __popc(ties[j]);
        }
    }
    __syncthreads();
    if (warp == 0) { // exclusive sums
        int own_above[kPerThread], own_ties[kPerThread], sum_above = 0, sum_ties = 0;
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) {
            own_above[j] = sum_above;
            own_ties[j] = sum_ties;
            sum_above += shared->above[lane * kPerThread + j];
            sum_ties += shared->ties[lane * kPerThread + j];
        }
        int before_above = sum_above, before_ties = sum_ties;
        for (int step = 1; step < kWarpSize; step *= 2) {
            const int other_above = __shfl_up_sync(kFullMask, before_above, step);
            const int other_ties = __shfl_up_sync(kFullMask, before_ties, step);
            before_above += lane >= step ? other_above : 0;
            before_ties += lane >= step ? other_ties : 0;
        }
        if (lane == kWarpSize - 1) {
            shared->chunk_above = before_above;
            shared->chunk_ties = before_ties;
        }
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) {
            shared->above[lane * kPerThread + j] = before_above - sum_above + own_above[j];
            shared->ties[lane * kPerThread + j] = before_ties - sum_ties + own_ties[j];
        }
    }
    __syncthreads();
    const unsigned lower = (1u << lane) - 1;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
        const int tie = *n_ties + shared->ties[j * kWarps + warp] + __popc(ties[j] & lower);
        const int position = *n_above + shared->above[j * kWarps + warp] +
                             __popc(above[j] & lower) + min(tie, kept.n_ties);
        if ((above[j] >> lane & 1u) != 0 || ((ties[j] >> lane & 1u) != 0 && tie < kept.n_ties)) {
            store(position, row.weight(logits[j], temperature),
                  int32_t(begin + j * kThreads + threadIdx.x));
        }
    }
    *n_above += shared->chunk_above;
    *n_ties += shared->chunk_ties;
    __syncthreads();
}

// block_sums: of the kept weights, [ceil(n / kBlock)], then the kept logits before each chunk.
__device__ int32_t pick(Shared *shared, const Row &row, const Kept &kept, float temperature,
                        double uniform, double *block_sums) {
    const int n_blocks = int((row.n + sampling::kBlock - 1) / sampling::kBlock);
    auto *before = reinterpret_cast<int2 *>(block_sums + n_blocks);
    const auto position_of = [&](int above, int ties) { return above + min(ties, kept.n_ties); };
    int n_above = 0, n_ties = 0, n_summed = 0; // weights in block sums
    for (int64_t begin = 0; begin < row.n; begin += kChunk) {
        if (threadIdx.x == 0) {
            before[begin / kChunk] = make_int2(n_above, n_ties);
        }
        compact(shared, row, kept, temperature, begin, &n_above, &n_ties,
                [&](int position, float weight, int32_t) {
                    shared->staged[position - n_summed] = weight;
                });
        const int n = position_of(n_above, n_ties) - n_summed;
        const bool is_last = begin + kChunk >= row.n;
        const int n_full = is_last ? (n + int(sampling::kBlock) - 1) / int(sampling::kBlock)
                                   : n / int(sampling::kBlock);
        const int block = threadIdx.x / sampling::kLanes;
        const int lane = threadIdx.x % sampling::kLanes;
        if (block < n_full) {
            const int end = min(n, (block + 1) * int(sampling::kBlock));
            double sum = 0;
#pragma unroll 8
            for (int i = block * int(sampling::kBlock) + lane; i < end; i += sampling::kLanes) {
                sum += double(shared->staged[i]);
            }
            sum = sum_lanes(own_lanes(), sum);
            if (lane == 0) {
                block_sums[n_summed / int(sampling::kBlock) + block] = sum;
            }
        }
        const int n_left = is_last ? 0 : n - n_full * int(sampling::kBlock); // below kBlock
        const bool moves = int(threadIdx.x) < n_left;
        const float moved =
            moves ? shared->staged[n_full * int(sampling::kBlock) + int(threadIdx.x)] : 0.0f;
        __syncthreads();
        if (moves) {
            shared->staged[threadIdx.x] = moved;
        }
        n_summed += n_full * int(sampling::kBlock);
        __syncthreads();
    }
    const int n_kept = position_of(n_above, n_ties);
    if (threadIdx.x == 0) {
        const int n_sums = (n_kept + int(sampling::kBlock) - 1) / int(sampling::kBlock);
        double sum = 0;
        for (int i = 0; i < n_sums; ++i) {
            sum += block_sums[i];
        }
        shared->found = find_block(block_sums, n_sums, __dmul_rn(uniform, sum));
    }
    __syncthreads();
    const int first = int(shared->found.begin);
    const int end = min(n_kept, first + int(sampling::kBlock));
    for (int64_t begin = 0; begin < row.n; begin += kChunk) {
        const int2 done = before[begin / kChunk];
        n_above = done.x, n_ties = done.y;
        if (position_of(n_above, n_ties) >= end) {
            break;
        }
        if (begin + kChunk < row.n) {
            const int2 next = before[begin / kChunk + 1];
            if (position_of(next.x, next.y) <= first) {
                continue;
            }
        }
        compact(shared, row, kept, temperature, begin, &n_above, &n_ties,
                [&](int position, float weight, int32_t id) {
                    if (position >= first && position < end) {
                        shared->staged[position - first] = weight;
                        shared->staged_ids[position - first] = id;
                    }
                });
    }
    return threadIdx.x == 0
               ? shared->staged_ids[find_weight(shared->staged, end - first, shared->found) - first]
               : 0;
}

__global__ void __launch_bounds__(kThreads) sample_wide_rows_kernel(Sampling d) {
    extern __shared__ double block_sums[];
    __shared__ Shared shared;
    grid_dependency_wait();
    const int r = blockIdx.x;
    const int first = d.processor_offsets[r];
    const int end = d.processor_offsets[r + 1];
    if (d.is_open[r] == 0 || SampleKind(d.kinds[r]) != SampleKind::cut || first == end) {
        return;
    }
    const int64_t at = d.rows != nullptr ? d.rows[r] : r;
    const Row row{d.logits + at * d.vocabulary, d.vocabulary, d.best[at * d.k], d.temperatures[r]};
    if (!(row.max > -INFINITY)) {
        return;
    }
    float temperature = row.temperature;
    Kept kept;
    for (int i = first; i < end; ++i) {
        const float value = d.processor_values[i];
        switch (LogitsProcessorKind(d.processors[i])) {
        case LogitsProcessorKind::temperature:
            temperature = value;
            break;
        case LogitsProcessorKind::top_p:
            if (i != first) {
                return; // of the sum of kept weights: the host decides
            }
            if (threadIdx.x == 0) {
                shared.target = __dmul_rn(double(value), d.sums[r]);
            }
            __syncthreads();
            if (!find_cutoff(&shared, row, &kept)) {
                return;
            }
            break;
        case LogitsProcessorKind::min_p:
            if (kept.floor > 0) {
                return;
            }
            kept.floor = value;
            kept.floor_temperature = temperature;
            break;
        default:
            return;
        }
    }
    const int32_t id = pick(&shared, row, kept, temperature, d.uniforms[r], block_sums);
    if (threadIdx.x == 0) {
        d.ids[r] = id;
        d.is_open[r] = 0;
    }
}

} // namespace

void sample_wide_rows(const device::CudaStream &stream, const Sampling &d, int64_t n) {
    const int64_t n_blocks = (d.vocabulary + sampling::kBlock - 1) / sampling::kBlock;
    const int64_t n_chunks = (d.vocabulary + kChunk - 1) / kChunk;
    const size_t bytes = size_t(n_blocks) * sizeof(double) + size_t(n_chunks) * sizeof(int2);
    set_max_dynamic_smem(sample_wide_rows_kernel, bytes);
    launch(stream, sample_wide_rows_kernel, unsigned(n), kThreads, bytes, true, d);
}

} // namespace llaisys::ops::cuda
