#include "ops/attention/cuda_bytes.cuh"

#include <algorithm>

namespace llaisys::ops::cuda {

namespace {

constexpr int kCopyThreads = 256;
constexpr int kCopyEntries = 64; // per block, whole pages

// Dense copy of the entries of runs, and its block tables.
template <typename T> struct DenseCopy {
    T *k, *v;        // [n_copied, kv_heads, d]
    int32_t *tables; // [rows, width], blocks of kCopyPage
    int32_t width;
};

// 16 bytes times their scale.
template <typename T, typename Format>
__device__ __forceinline__ void dequantise_16(const uint8_t *from, float scale, T *to) {
    const uint4 raw = *reinterpret_cast<const uint4 *>(from);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    uint32_t values[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t pairs[2];
        Format::to_f16(words[i], &pairs[0], &pairs[1]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const float2 both = __half22float2(*reinterpret_cast<const __half2 *>(&pairs[j]));
            values[2 * i + j] = pack_pair<T>(both.x * scale, both.y * scale);
        }
    }
    reinterpret_cast<uint4 *>(to)[0] = make_uint4(values[0], values[1], values[2], values[3]);
    reinterpret_cast<uint4 *>(to)[1] = make_uint4(values[4], values[5], values[6], values[7]);
}

// Grid (group of kCopyEntries entries, run). Memory-bound.
template <typename T, typename Format>
__global__ void __launch_bounds__(kCopyThreads)
    copy_runs_kernel(AttentionArgs args, const int32_t *runs, const int32_t *extents, int d,
                     DenseCopy<T> copy) {
    grid_dependency_wait();
    const int first = extents[2 * blockIdx.y];
    const int n = extents[2 * blockIdx.y + 1];
    const int e0 = int(blockIdx.x) * kCopyEntries;
    if (e0 >= n) {
        return;
    }
    const int token = runs[2 * blockIdx.y];
    const int32_t *table = args.table_of(token);
    if (threadIdx.x < kCopyEntries / kCopyPage) {
        const int page = e0 / int(kCopyPage) + int(threadIdx.x);
        if (page * int(kCopyPage) < n) {
            copy.tables[int64_t(args.q_rows[token]) * copy.width + page] =
                first / int(kCopyPage) + page;
        }
    }
    const int chunks = args.kv_heads * d / 16; // of an entry
    const int64_t width = int64_t(args.kv_heads) * d;
    for (int c = threadIdx.x; c < kCopyEntries * chunks; c += kCopyThreads) {
        const int e = e0 + c / chunks;
        if (e >= n) {
            break;
        }
        const int64_t slot = args.slot_of(table, e);
        const int at = c % chunks * 16;
        const int64_t scale = int64_t(at / d) * args.n_slots + slot;
        dequantise_16<T, Format>(static_cast<const uint8_t *>(args.k) + slot * width + at,
                                 args.k_scales[scale], copy.k + (first + e) * width + at);
        dequantise_16<T, Format>(static_cast<const uint8_t *>(args.v) + slot * width + at,
                                 args.v_scales[scale], copy.v + (first + e) * width + at);
    }
}

// Every token as a decode token.
template <int D> void decode_all(const AttentionLaunch &all, DType cache) {
    for_exact_tokens(all.args, all.n, [&](const AttentionArgs &args, int64_t count) {
        decode_bytes<D>({all.stream, args, all.dtype, cache, nullptr, count, false});
    });
}

// Copies the sequences of the runs and launches the 16-bit kernels over the copy.
template <typename T>
void attend_runs(const AttentionLaunch &all, const KvLayer &kv, const AttentionLists &lists,
                 const AttentionRuns &runs, LaunchAttention launch_16) {
    const int64_t values = runs.n_copied * kv.n_heads * kv.head_dim;
    const int64_t most = lists.tables.size(1) * lists.block_size; // entries of a sequence
    const int64_t width = (most + kCopyPage - 1) / kCopyPage;
    const int64_t bytes = 2 * values * int64_t(sizeof(T)) + lists.tables.size(0) * width * 4;
    auto *scratch = static_cast<T *>(all.stream.scratch.at_least(size_t(bytes)));
    const DenseCopy<T> copy{scratch, scratch + values,
                            reinterpret_cast<int32_t *>(scratch + 2 * values), int32_t(width)};
    const auto kernel =
        kv.k.dtype() == LLAISYS_DTYPE_I8 ? copy_runs_kernel<T, Int8> : copy_runs_kernel<T, E4m3>;
    const dim3 grid(ceil_div(most, kCopyEntries), unsigned(runs.n_runs));
    launch(all.stream, kernel, grid, kCopyThreads, 0, false, all.args, runs.runs.as<int32_t>(),
           runs.extents.as<int32_t>(), int(kv.head_dim), copy);
    AttentionArgs args = all.args;
    args.k = copy.k;
    args.v = copy.v;
    args.tables = copy.tables;
    args.width_at = nullptr;
    args.width = copy.width;
    args.block_size = int32_t(kCopyPage);
    args.block_shift = block_shift_of(args.block_size);
    AttentionRuns only_runs = runs;
    only_runs.n_singles = 0;
    only_runs.singles = Tensor();
    only_runs.n_long = 0;
    launch_16({all.stream, args, all.dtype, all.n - runs.n_singles, runs.n_copied, &only_runs});
}

} // namespace

void attention_bytes(const AttentionLaunch &all, const KvLayer &kv, const AttentionLists &lists,
                     const AttentionRuns *runs, LaunchAttention launch) {
    const DType cache = kv.k.dtype();
    const int64_t n_in_runs = runs != nullptr ? all.n - count_singles(*runs, all.n) : 0;
    const bool are_copied = n_in_runs > 0 && runs->extents.defined() && runs->n_copied > 0 &&
                            4 * runs->n_copied * kv.n_heads * kv.head_dim <= kMaxCopyBytes &&
                            n_in_runs > kShortRun * runs->n_runs;
    dispatch_head_dim(kv.head_dim, [&](auto d) {
        if (runs == nullptr || (n_in_runs > 0 && !are_copied)) {
            return decode_all<d()>(all, cache);
        }
        for_singles(all.stream, all.args, *runs, all.n,
                    [&](const int32_t *tokens, int64_t n, bool are_long) {
                        decode_bytes<d()>(
                            {all.stream, all.args, all.dtype, cache, tokens, n, are_long});
                    });
    });
    if (are_copied) {
        dispatch_half(all.dtype, [&](auto type) {
            attend_runs<decltype(type)>(all, kv, lists, *runs, launch);
        });
    }
}

} // namespace llaisys::ops::cuda
