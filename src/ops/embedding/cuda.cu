// Rows of a table. One block a row; bound by memory.
#include "ops/embedding/cuda.hpp"

#include "ops/cuda/common.cuh"

namespace llaisys::ops {

namespace {

constexpr int kThreads = 256;

__global__ void embedding_kernel(cuda::Reals out, const int64_t *index, cuda::Reals table,
                                 int64_t rows, int64_t d) {
    cuda::wait_for_input();
    cuda::allow_next();
    const int64_t i = blockIdx.x;
    const int64_t row = index[i];
    const bool is_inside = row >= 0 && row < rows;
    for (int64_t c = threadIdx.x; c < d; c += kThreads) {
        out.store(i * d + c, is_inside ? table.load(row * d + c) : 0.0f);
    }
}

} // namespace

void embedding_cuda(const device::Stream &stream, const Tensor &out, const Tensor &index,
                    const Tensor &table) {
    const int64_t n = out.size(0);
    if (n > 0) {
        cuda::launch(device::cuda_stream_of(stream), embedding_kernel, unsigned(n), kThreads, 0,
                     true, cuda::reals(out), index.as<int64_t>(), cuda::reals(table), table.size(0),
                     table.size(1));
    }
}

} // namespace llaisys::ops
