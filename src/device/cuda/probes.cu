// Probes: 2 GiB read with 16-byte loads, FMA in registers, one large GEMM.
#include "device/cuda/probes.hpp"

#include "device/cuda/cublaslt_gemm.hpp"

#include <algorithm>
#include <cstdint>

namespace llaisys::device {

namespace {

constexpr int kThreads = 512;
constexpr int kRounds = 5;
constexpr int64_t kReadBytes = int64_t(2) << 30;
constexpr int64_t kSide = 8192; // rows and columns of the GEMM
constexpr int kChains = 8;      // independent FMA chains
constexpr int kSteps = 4096;

struct Event {
    Event() { LLAISYS_CUDA(cudaEventCreate(&event)); }
    ~Event() { cudaEventDestroy(event); }
    Event(const Event &) = delete;
    Event &operator=(const Event &) = delete;
    cudaEvent_t event = nullptr;
};

struct Memory {
    explicit Memory(int64_t bytes) { LLAISYS_CUDA(cudaMalloc(&data, size_t(bytes))); }
    ~Memory() { cudaFree(data); }
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    void *data = nullptr;
};

// The store never executes; it keeps the loads alive.
__global__ void read_kernel(const uint4 *data, int64_t n, uint32_t *out) {
    const int64_t step = int64_t(gridDim.x) * kThreads;
    uint32_t sum = 0;
#pragma unroll 8
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
        const uint4 x = __ldcs(data + i);
        sum |= x.x | x.y | x.z | x.w;
    }
    if (sum == 1) {
        *out = sum;
    }
}

__global__ void multiply_add_kernel(float factor, float *out) {
    float x[kChains];
    for (int c = 0; c < kChains; ++c) {
        x[c] = float(threadIdx.x + c);
    }
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int c = 0; c < kChains; ++c) {
            x[c] = fmaf(x[c], factor, 0.5f);
        }
    }
    float sum = 0;
    for (int c = 0; c < kChains; ++c) {
        sum += x[c];
    }
    if (sum == -1.0f) {
        *out = sum;
    }
}

// bf16 values in +-[0.5, 1): a GEMM of zeros takes less power and time.
__global__ void fill_kernel(uint16_t *values, int64_t n) {
    const int64_t step = int64_t(gridDim.x) * kThreads;
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
        uint32_t mixed = uint32_t(i) * 2654435761u;
        mixed ^= mixed >> 15;
        values[i] = uint16_t(0x3f00u | (mixed & 0x807fu));
    }
}

double best_of_rounds(const CudaStream &stream, const std::function<void()> &work) {
    double best = cuda_seconds(stream, 4, work);
    for (int round = 1; round < kRounds; ++round) {
        best = std::min(best, cuda_seconds(stream, 4, work));
    }
    return best;
}

double read_bandwidth(const CudaStream &stream) {
    const Memory memory(kReadBytes);
    LLAISYS_CUDA(cudaMemsetAsync(memory.data, 0, size_t(kReadBytes), stream.stream));
    const auto *data = static_cast<const uint4 *>(memory.data);
    auto *out = static_cast<uint32_t *>(memory.data);
    return double(kReadBytes) / best_of_rounds(stream, [&] {
               read_kernel<<<unsigned(8 * stream.n_sms), kThreads, 0, stream.stream>>>(
                   data, kReadBytes / int64_t(sizeof(uint4)), out);
               LLAISYS_CUDA(cudaGetLastError());
           });
}

double f32_operations(const CudaStream &stream) {
    const Memory memory(sizeof(float));
    const unsigned blocks = unsigned(16 * stream.n_sms);
    const double seconds = best_of_rounds(stream, [&] {
        multiply_add_kernel<<<blocks, kThreads, 0, stream.stream>>>(
            0.5f, static_cast<float *>(memory.data));
        LLAISYS_CUDA(cudaGetLastError());
    });
    return 2.0 * kChains * kSteps * kThreads * blocks / seconds;
}

double product_operations(const CudaStream &stream) {
    if (stream.products == nullptr) {
        return 0;
    }
    const Memory memory(3 * kSide * kSide * int64_t(sizeof(uint16_t)));
    auto *x = static_cast<uint16_t *>(memory.data);
    uint16_t *weight = x + kSide * kSide;
    uint16_t *out = weight + kSide * kSide;
    fill_kernel<<<unsigned(8 * stream.n_sms), kThreads, 0, stream.stream>>>(x, 2 * kSide * kSide);
    LLAISYS_CUDA(cudaGetLastError());
    const GemmProblem product{kSide,  kSide, kSide, LLAISYS_DTYPE_BF16, x,    kSide,
                              weight, out,   kSide, LLAISYS_DTYPE_BF16, false};
    bool is_possible = true;
    const double seconds = best_of_rounds(stream, [&] {
        is_possible =
            is_possible && stream.products->run(stream.stream, product, stream.has_trials);
    });
    return is_possible ? 2.0 * double(kSide) * double(kSide) * double(kSide) / seconds : 0;
}

} // namespace

double cuda_seconds(const CudaStream &stream, int repeats, const std::function<void()> &work) {
    LLAISYS_CUDA(cudaSetDevice(stream.device_id));
    const Event begin;
    const Event end;
    work();
    LLAISYS_CUDA(cudaEventRecord(begin.event, stream.stream));
    for (int i = 0; i < repeats; ++i) {
        work();
    }
    LLAISYS_CUDA(cudaEventRecord(end.event, stream.stream));
    LLAISYS_CUDA(cudaEventSynchronize(end.event));
    float milliseconds = 0;
    LLAISYS_CUDA(cudaEventElapsedTime(&milliseconds, begin.event, end.event));
    return double(milliseconds) * 1e-3 / repeats;
}

double measure_cuda(CudaStream &stream, Probe probe) {
    LLAISYS_CUDA(cudaSetDevice(stream.device_id));
    switch (probe) {
    case Probe::read_bandwidth:
        return read_bandwidth(stream);
    case Probe::f32:
        return f32_operations(stream);
    case Probe::f16:
        return product_operations(stream);
    default:
        return 0;
    }
}

} // namespace llaisys::device
