// Converts a mask into block tables, one row per token (one warp each), for the attention
// kernels. Needs n * m integers for a mask [n, m]; for tests.
#include "ops/self_attention_masked/op.hpp"

#include "ops/attention/op.hpp"
#include "ops/cuda/common.cuh"

namespace llaisys::ops {

namespace {

__global__ void lists_kernel(const uint8_t *mask, int64_t m, int32_t *rows, int32_t *begin,
                             int32_t *end, int32_t *tables) {
    const int64_t token = blockIdx.x;
    int count = 0;
    for (int64_t first = 0; first < m; first += cuda::kWarpSize) {
        const int64_t key = first + threadIdx.x;
        const bool is_seen = key < m && mask[token * m + key] != 0;
        const unsigned seen = __ballot_sync(cuda::kFullMask, is_seen);
        if (is_seen) {
            const int place = count + __popc(seen & ((1u << threadIdx.x) - 1));
            tables[token * m + place] = int32_t(key);
        }
        count += __popc(seen);
    }
    if (threadIdx.x == 0) {
        rows[token] = int32_t(token);
        begin[token] = 0;
        end[token] = count;
    }
}

} // namespace

void self_attention_masked_cuda(const device::Stream &stream, const Tensor &out, const Tensor &q,
                                const Tensor &k, const Tensor &v, const Tensor &mask, float scale) {
    const int64_t n = mask.size(0);
    const int64_t m = mask.size(1);
    if (q.elements() == 0) {
        return;
    }
    const auto integers = [&](const Shape &shape) {
        return Tensor::create(shape, LLAISYS_DTYPE_I32, stream.type(), stream.device_id());
    };
    AttentionLists lists;
    lists.q_rows = integers({n});
    lists.begin = integers({n});
    lists.end = integers({n});
    lists.tables = integers({n, m});
    lists.runs.is_known = true;
    lists.runs.are_all_single = true;
    cuda::launch(device::cuda_stream_of(stream), lists_kernel, unsigned(n), cuda::kWarpSize, 0,
                 false, mask.as<uint8_t>(), m, lists.q_rows.as<int32_t>(),
                 lists.begin.as<int32_t>(), lists.end.as<int32_t>(), lists.tables.as<int32_t>());
    attention(stream, out, q, slot_major(k, v), lists, scale);
    stream.synchronize(); // the tables are freed on return
}

} // namespace llaisys::ops
