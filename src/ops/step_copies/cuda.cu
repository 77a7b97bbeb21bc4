// Small copies between pinned host memory and the device, 16 bytes per thread. Host memory is
// read before grid_dependency_wait(): its content is final when the kernel is queued, so the host
// link latency overlaps with the previous kernel.
#include "ops/step_copies/op.hpp"

#include "ops/cuda/common.cuh"

namespace llaisys::ops {

namespace {

constexpr int kThreads = 256;
constexpr int64_t kUnit = sizeof(uint4);
// Larger copies use the copy engine; this many bytes take about 4 us over the host link.
constexpr int64_t kMostBytes = 128 << 10;

struct Sampled {
    int64_t first;       // 16-byte unit of tokens[0]
    int64_t n;           // tokens; 0: none
    const int2 *sources; // in host memory
    const int64_t *sampled;
};

__device__ __forceinline__ uint4 read_from_host(const uint4 *at) { return __ldcv(at); }
__device__ __forceinline__ int2 read_from_host(const int2 *at) { return __ldcv(at); }

__device__ __forceinline__ void put_token(uint32_t *low, uint32_t *high, int64_t token) {
    *low = uint32_t(uint64_t(token));
    *high = uint32_t(uint64_t(token) >> 32);
}

__global__ void __launch_bounds__(kThreads)
    bring_in_kernel(uint4 *to, const uint4 *from, int64_t units, Sampled sampled) {
    cuda::launch_dependents();
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t pair = i - sampled.first; // of tokens
    const bool has_first = i < units && pair >= 0 && 2 * pair < sampled.n;
    const bool has_second = has_first && 2 * pair + 1 < sampled.n;
    uint4 bits = make_uint4(0, 0, 0, 0);
    int2 source = make_int2(-1, -1);
    if (i < units) {
        bits = read_from_host(from + i);
    }
    if (has_first) {
        source = read_from_host(sampled.sources + pair);
    }
    cuda::grid_dependency_wait();
    if (has_first && source.x >= 0) {
        put_token(&bits.x, &bits.y, sampled.sampled[source.x]);
    }
    if (has_second && source.y >= 0) {
        put_token(&bits.z, &bits.w, sampled.sampled[source.y]);
    }
    if (i < units) {
        to[i] = bits;
    }
}

__global__ void __launch_bounds__(kThreads)
    bring_out_kernel(uint4 *to, const uint4 *from, int64_t units) {
    cuda::grid_dependency_wait();
    cuda::launch_dependents();
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < units) {
        to[i] = from[i];
    }
}

// For copies by the copy engine.
__global__ void __launch_bounds__(kThreads)
    fill_sampled_kernel(int64_t *tokens, const int32_t *sources, const int64_t *sampled,
                        int64_t n) {
    cuda::grid_dependency_wait();
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n && sources[i] >= 0) {
        tokens[i] = sampled[sources[i]];
    }
}

} // namespace

void bring_in_cuda(const device::Stream &stream, std::byte *to, const std::byte *from,
                   int64_t bytes, const SampledTokens *sampled) {
    if (bytes == 0) {
        return;
    }
    const device::CudaStream &on = device::cuda_stream_of(stream);
    const int64_t n = sampled != nullptr ? sampled->tokens.size(0) : 0;
    if (bytes <= kMostBytes) {
        Sampled filled{};
        if (n > 0) {
            filled = {(sampled->tokens.data() - to) / kUnit, n,
                      reinterpret_cast<const int2 *>(from + (sampled->sources.data() - to)),
                      sampled->sampled.as<int64_t>()};
        }
        return cuda::launch(on, bring_in_kernel, cuda::ceil_div(bytes / kUnit, kThreads), kThreads,
                            0, true, reinterpret_cast<uint4 *>(to),
                            reinterpret_cast<const uint4 *>(from), bytes / kUnit, filled);
    }
    stream.runtime().copy(to, from, size_t(bytes), device::CopyKind::host_to_device,
                          stream.native());
    if (n > 0) {
        cuda::launch(on, fill_sampled_kernel, cuda::ceil_div(n, kThreads), kThreads, 0, true,
                     sampled->tokens.as<int64_t>(), sampled->sources.as<int32_t>(),
                     sampled->sampled.as<int64_t>(), n);
    }
}

void bring_out_cuda(const device::Stream &stream, std::byte *to, const std::byte *from,
                    int64_t bytes) {
    if (bytes == 0) {
        return;
    }
    if (bytes > kMostBytes) {
        return stream.runtime().copy(to, from, size_t(bytes), device::CopyKind::device_to_host,
                                     stream.native());
    }
    cuda::launch(device::cuda_stream_of(stream), bring_out_kernel,
                 cuda::ceil_div(bytes / kUnit, kThreads), kThreads, 0, true,
                 reinterpret_cast<uint4 *>(to), reinterpret_cast<const uint4 *>(from),
                 bytes / kUnit);
}

} // namespace llaisys::ops
