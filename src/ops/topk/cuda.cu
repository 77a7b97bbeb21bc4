// The k largest of each row, largest first, lower index first among equals.
//
//   k up to 1024    radix_topk_kernel: one block per row. Histograms of the leading bits of the
//                   order-preserving keys bound the k-th largest; values not below the bound are
//                   collected and sorted in shared memory. Long rows: the bound is that of an eighth
//                   of the row, for a larger k, and usually leaves k to 2048 candidates. Otherwise
//                   histograms of 11, 11 and 10 bits of the whole row follow until at most 2048
//                   candidates are left. Bound: DRAM with many rows.
//   more            selected on the host
#include "ops/topk/op.hpp"

#include "ops/cuda/common.cuh"
#include "ops/cuda/row_values.cuh"

namespace llaisys::ops {

namespace {

constexpr int kRadixThreads = 1024;
constexpr int kRadixBins = 2048;
constexpr int kCandidates = 2048;
constexpr int kMostSelected = 1024;
constexpr int kSampleEvery = 8;
constexpr int64_t kMinSampledRow = 32 * kRadixThreads;

// Leading bits of the k-th largest key, and the number of keys above them.
struct Cut {
    uint32_t prefix, mask;
    int above, inside;
};

// Finds the histogram bin of the k-th largest, from the top; one warp.
__device__ __forceinline__ void narrow(Cut *cut, const int *histogram, int bins, int shift, int k) {
    const int lane = threadIdx.x % cuda::kWarpSize;
    const int own = bins / cuda::kWarpSize;
    int sum = 0;
    for (int i = 0; i < own; ++i) {
        sum += histogram[lane * own + i];
    }
    int above = cut->above; // keys above, including the higher lanes
    for (int other = cuda::kWarpSize - 1; other > 0; --other) {
        const int theirs = __shfl_sync(cuda::kFullMask, sum, other);
        above += other > lane ? theirs : 0;
    }
    __syncwarp();
    if (above < k && above + sum >= k) {
        int bin = lane * own + own - 1;
        for (; above + histogram[bin] < k; --bin) {
            above += histogram[bin];
        }
        cut->prefix |= uint32_t(bin) << shift;
        cut->mask |= uint32_t(bins - 1) << shift;
        cut->above = above;
        cut->inside = histogram[bin];
    }
}

// Bitonic sort, descending; n a power of two. All threads of the block.
__device__ __forceinline__ void sort_descending(uint64_t *list, int n) {
    for (int size = 2; size <= n; size *= 2) {
        for (int step = size / 2; step > 0; step /= 2) {
            for (int i = threadIdx.x; i < n / 2; i += kRadixThreads) {
                const int low = 2 * i - (i & (step - 1));
                const bool is_descending = (low & size) == 0;
                const uint64_t a = list[low];
                const uint64_t b = list[low + step];
                if ((a < b) == is_descending) {
                    list[low] = b;
                    list[low + step] = a;
                }
            }
            __syncthreads();
        }
    }
}

__global__ void __launch_bounds__(kRadixThreads)
    radix_topk_kernel(int32_t *index, float *value, const float *values, int64_t n, int k) {
    __shared__ int histogram[kRadixBins];
    __shared__ uint64_t list[kCandidates]; // key, then the complemented index
    __shared__ Cut cut;
    __shared__ int n_listed;
    cuda::grid_dependency_wait();
    cuda::launch_dependents();
    const float *row = values + int64_t(blockIdx.x) * n;
    index += int64_t(blockIdx.x) * k;
    value += int64_t(blockIdx.x) * k;
    if (threadIdx.x == 0) {
        cut = {0, 0, 0, 0};
        n_listed = 0;
    }
    // Histograms of the leading bits of keys narrow the cut; `rounds` of them, one chunk of kRadixThreads
    // values in `every`.
    const auto select = [&](int rank, int rounds, int every) {
        constexpr int kShifts[] = {21, 10, 0};
        constexpr int kBins[] = {2048, 2048, 1024};
        for (int round = 0; round < rounds; ++round) {
            for (int i = threadIdx.x; i < kRadixBins; i += kRadixThreads) {
                histogram[i] = 0;
            }
            __syncthreads();
            const Cut known = cut;
            if (every == 1 && round > 0 && known.above + known.inside <= kCandidates) {
                break;
            }
#pragma unroll 8
            for (int64_t i = threadIdx.x; i < n; i += int64_t(every) * kRadixThreads) {
                const uint32_t key = cuda::key_of(row[i]);
                if ((key & known.mask) == known.prefix) {
                    atomicAdd(histogram + (key >> kShifts[round] & uint32_t(kBins[round] - 1)), 1);
                }
            }
            __syncthreads();
            if (threadIdx.x < cuda::kWarpSize) {
                narrow(&cut, histogram, kBins[round], kShifts[round], rank);
            }
            __syncthreads();
        }
    };
    // Lists the values whose leading bits are not below those of the cut, or are above them.
    const auto collect = [&](const Cut &from, bool only_above) {
#pragma unroll 8
        for (int64_t i = threadIdx.x; i < n; i += kRadixThreads) {
            const uint32_t key = cuda::key_of(row[i]);
            const uint32_t leading = key & from.mask;
            if (only_above ? leading > from.prefix : leading >= from.prefix) {
                const int at = atomicAdd(&n_listed, 1);
                if (at < kCandidates) {
                    list[at] = uint64_t(key) << 32 | uint32_t(~uint32_t(i));
                }
            }
        }
        __syncthreads();
    };
    // The cut of a sample usually leaves a few more than k, so that the row is read once.
    const float share = float(k) / kSampleEvery; // expected in the sample
    const int rank = int(1.5f * share + 4 * sqrtf(share) + 4);
    bool is_done = false;
    if (n >= kMinSampledRow && rank * kSampleEvery <= kCandidates * 3 / 4) {
        select(rank, 2, kSampleEvery);
        const Cut sampled = cut;
        collect(sampled, false);
        is_done = n_listed >= k && n_listed <= kCandidates;
        __syncthreads();
        if (threadIdx.x == 0 && !is_done) {
            cut = {0, 0, 0, 0};
            n_listed = 0;
        }
        __syncthreads();
    }
    if (!is_done) {
        select(k, 3, 1);
    }
    const Cut found = cut;
    // Too many equal the k-th: the last loop selects the lowest indices.
    const bool are_many = !is_done && found.above + found.inside > kCandidates;
    if (!is_done) {
        collect(found, are_many);
    }
    const int count = n_listed;
    int n_sorted = 2;
    while (n_sorted < count) {
        n_sorted *= 2;
    }
    for (int i = count + int(threadIdx.x); i < n_sorted; i += kRadixThreads) {
        list[i] = 0;
    }
    __syncthreads();
    sort_descending(list, n_sorted);
    for (int i = threadIdx.x; i < min(count, k); i += kRadixThreads) {
        index[i] = int32_t(~uint32_t(list[i]));
        value[i] = cuda::value_of(uint32_t(list[i] >> 32));
    }
    if (!are_many) {
        return;
    }
    // In index order, one block width at a time.
    const int warp = threadIdx.x / cuda::kWarpSize;
    const unsigned lower = (1u << threadIdx.x % cuda::kWarpSize) - 1;
    for (int64_t first = 0, placed = count; first < n && placed < k; first += kRadixThreads) {
        const int64_t i = first + threadIdx.x;
        const bool is_equal = i < n && cuda::key_of(row[i]) == found.prefix;
        const unsigned equals = __ballot_sync(cuda::kFullMask, is_equal);
        __syncthreads(); // the histogram now holds the counts per warp
        if (threadIdx.x % cuda::kWarpSize == 0) {
            histogram[warp] = __popc(equals);
        }
        __syncthreads();
        int64_t at = placed + __popc(equals & lower);
        for (int w = 0; w < kRadixThreads / cuda::kWarpSize; ++w) {
            at += w < warp ? histogram[w] : 0;
            placed += histogram[w];
        }
        if (is_equal && at < k) {
            index[at] = int32_t(i);
            value[at] = cuda::value_of(found.prefix);
        }
    }
}

void select_on_host(Tensor index, Tensor value, const Tensor &values) {
    const device::Stream host(LLAISYS_DEVICE_CPU, 0, 0);
    const Tensor rows = Tensor::create(values.shape(), LLAISYS_DTYPE_F32);
    const Tensor best = Tensor::create(value.shape(), LLAISYS_DTYPE_F32);
    const Tensor best_index = Tensor::create(index.shape(), LLAISYS_DTYPE_I32);
    values.store(rows.data(), size_t(rows.bytes()));
    topk_cpu(host, best_index, best, rows);
    index.load(best_index.data(), size_t(index.bytes()));
    value.load(best.data(), size_t(value.bytes()));
}

} // namespace

void topk_cuda(const device::Stream &stream, const Tensor &index, const Tensor &value,
               const Tensor &values) {
    if (values.size(0) == 0) {
        return;
    }
    const device::CudaStream &on = device::cuda_stream_of(stream);
    const auto rows = unsigned(values.size(0));
    if (value.size(1) > kMostSelected) {
        return select_on_host(index, value, values);
    }
    cuda::launch(on, radix_topk_kernel, rows, kRadixThreads, 0, true, index.as<int32_t>(),
                 value.as<float>(), values.as<float>(), values.size(1), value.size(1));
}

} // namespace llaisys::ops
