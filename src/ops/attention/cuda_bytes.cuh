// Attention over 8-bit caches:
//
//   single query tokens (decode)  cuda_decode_bytes.cuh
//   runs of query tokens          the entries of their sequences are dequantised to a dense copy of
//                                 16-bit pages, which the 16-bit kernels read. The copy costs 3 bytes
//                                 per value and layer, small against the products of a run
//   short runs, batch-invariant streams, and sequences whose copy has more than kMaxCopyBytes
//                                 as single query tokens
#pragma once

#include "ops/attention/cuda_launch.cuh"
#include "ops/kv_layer.hpp"

namespace llaisys::ops::cuda {

constexpr int64_t kMaxCopyBytes = int64_t(1) << 30; // keys and values
constexpr int64_t kShortRun = 4;                    // average tokens of runs that are not copied

// Largest number of query heads per KV head with fast kernels.
inline int max_byte_group(int64_t head_dim) { return head_dim == 64 || head_dim == 128 ? 16 : 8; }

// runs null: batch-invariant. launch: the 16-bit kernels of the head_dim.
void attention_bytes(const AttentionLaunch &all, const KvLayer &kv, const AttentionLists &lists,
                     const AttentionRuns *runs, LaunchAttention launch);

// n decode tokens; `tokens`: their indices, null: 0 .. n - 1.
struct ByteDecode {
    device::CudaStream &stream;
    const AttentionArgs &args;
    DType dtype; // of queries and outputs
    DType cache;
    const int32_t *tokens;
    int64_t n;
    bool are_long;
};

template <int D> void decode_bytes(const ByteDecode &l) {
    const auto run = [&](auto type, auto format) {
        using T = decltype(type);
        using Format = decltype(format);
        if constexpr (D == 64 || D == 128) {
            if (l.args.group > 8) {
                run_decode_bytes<T, Format, D, 2>(l.stream, l.args, l.tokens, l.n, l.are_long);
                return;
            }
        }
        run_decode_bytes<T, Format, D, 1>(l.stream, l.args, l.tokens, l.n, l.are_long);
    };
    dispatch_half(l.dtype, [&](auto type) {
        if (l.cache == LLAISYS_DTYPE_I8) {
            run(type, Int8{});
        } else {
            run(type, E4m3{});
        }
    });
}

// In cuda_bytes_*.cu: they compile in parallel.
extern template void decode_bytes<64>(const ByteDecode &);
extern template void decode_bytes<80>(const ByteDecode &);
extern template void decode_bytes<96>(const ByteDecode &);
extern template void decode_bytes<112>(const ByteDecode &);
extern template void decode_bytes<128>(const ByteDecode &);
extern template void decode_bytes<192>(const ByteDecode &);
extern template void decode_bytes<256>(const ByteDecode &);

} // namespace llaisys::ops::cuda
