// Shared by the kernel checks: device arrays of random values, naive references, PASS and FAIL
// lines, graph timing. For programs that run on a GPU (scripts/check_kernels.sh).
#pragma once

#include "ops/cuda/gemm_epilogue.cuh"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace check {

using llaisys::device::CudaStream;
using llaisys::ops::cuda::bf16;
using llaisys::ops::cuda::f16;

// Measured on an H200, per second: bytes read and bf16 FLOP of the tensor cores.
inline constexpr double kReadBandwidth = 4.39e12;
inline constexpr double kPeak = 793e12;

inline int &failures() {
    static int count = 0;
    return count;
}

inline void report(bool passed, const std::string &what) {
    std::printf("%s %s\n", passed ? "PASS" : "FAIL", what.c_str());
    std::fflush(stdout);
    failures() += passed ? 0 : 1;
}

template <typename... Parts> std::string line(const char *format, Parts... parts) {
    char text[256];
    std::snprintf(text, sizeof text, format, parts...);
    return text;
}

template <typename T> const char *name_of();
template <> inline const char *name_of<bf16>() { return "bf16"; }
template <> inline const char *name_of<f16>() { return "f16"; }
template <> inline const char *name_of<float>() { return "f32"; }

template <typename T> inline constexpr llaisys::DType dtype_of = LLAISYS_DTYPE_F32;
template <> inline constexpr llaisys::DType dtype_of<bf16> = LLAISYS_DTYPE_BF16;
template <> inline constexpr llaisys::DType dtype_of<f16> = LLAISYS_DTYPE_F16;

inline float host_float(float x) { return x; }
inline float host_float(bf16 x) { return __bfloat162float(x); }
inline float host_float(f16 x) { return __half2float(x); }
template <typename T> T host_value(float x);
template <> inline float host_value<float>(float x) { return x; }
template <> inline bf16 host_value<bf16>(float x) { return __float2bfloat16(x); }
template <> inline f16 host_value<f16>(float x) { return __float2half(x); }

// Owning device array of n values. Copies are synchronous: the streams of the checks are
// non-blocking and do not wait for the default stream.
template <typename T> class Array {
public:
    explicit Array(size_t n) : n_(n) { LLAISYS_CUDA(cudaMalloc(&data_, n * sizeof(T) + 16)); }
    explicit Array(const std::vector<T> &values) : Array(values.size()) { put(values); }
    ~Array() { cudaFree(data_); }
    Array(const Array &) = delete;
    Array &operator=(const Array &) = delete;

    T *get() const { return static_cast<T *>(data_); }
    size_t size() const { return n_; }
    void put(const std::vector<T> &values) {
        LLAISYS_CUDA(cudaMemcpy(data_, values.data(), n_ * sizeof(T), cudaMemcpyHostToDevice));
        LLAISYS_CUDA(cudaDeviceSynchronize());
    }
    // All bytes 0xff: NaN in every dtype, -1 in integers.
    void poison() { fill_with(0xff); }
    void clear() { fill_with(0); }
    std::vector<T> host() const {
        std::vector<T> values(n_);
        LLAISYS_CUDA(cudaDeviceSynchronize());
        LLAISYS_CUDA(cudaMemcpy(values.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }

private:
    void fill_with(int byte) {
        LLAISYS_CUDA(cudaMemset(data_, byte, n_ * sizeof(T)));
        LLAISYS_CUDA(cudaDeviceSynchronize());
    }

    size_t n_;
    void *data_ = nullptr;
};

template <typename T> std::vector<T> normal(size_t n, unsigned seed, float scale = 1.0f) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> sample(0.0f, scale);
    std::vector<T> values(n);
    for (T &value : values) {
        value = host_value<T>(sample(engine));
    }
    return values;
}

__global__ inline void fill_kernel(bf16 *to, size_t n, uint32_t seed) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n;
         i += size_t(gridDim.x) * blockDim.x) {
        uint32_t x = uint32_t(i) * 2654435761u + seed;
        x ^= x >> 16;
        x *= 2246822519u;
        x ^= x >> 13;
        to[i] = __float2bfloat16_rn((float(x) / 4294967296.0f - 0.5f) * 0.1f);
    }
}

// Random values generated on the device, for gigabytes of weights.
inline void fill(bf16 *to, size_t n, uint32_t seed) {
    fill_kernel<<<1024, 256>>>(to, n, seed);
    LLAISYS_CUDA(cudaDeviceSynchronize());
}

// got - expected| / |expected| over all values, and the largest difference relative to the RMS of the expected values. NaN never passes.
struct Distance {
    double relative = 0;
    double largest = 0;
    bool within(double most_relative, double most_largest) const {
        return relative <= most_relative && largest <= most_largest;
    }
};

template <typename T>
Distance distance(const std::vector<T> &got, const std::vector<double> &expected) {
    double squares = 0, total = 0, largest = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
        const double difference = double(host_float(got[i])) - expected[i];
        squares += difference * difference;
        total += expected[i] * expected[i];
        largest = std::isnan(difference) ? NAN : std::max(largest, std::abs(difference));
        if (std::isnan(difference)) {
            return {NAN, NAN};
        }
    }
    const double rms = std::sqrt(total / double(std::max<size_t>(1, expected.size())));
    return {std::sqrt(squares / std::max(total, 1e-30)), largest / std::max(rms, 1e-30)};
}

// Median microseconds per launch of `per_replay` launches in a replayed graph.
inline double time_of(const CudaStream &stream, int per_replay,
                      const std::function<void(int)> &launch, int replays = 11) {
    launch(0); // one-time initialization
    LLAISYS_CUDA(cudaStreamSynchronize(stream.stream));
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    LLAISYS_CUDA(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < per_replay; ++i) {
        launch(i);
    }
    LLAISYS_CUDA(cudaStreamEndCapture(stream.stream, &graph));
    LLAISYS_CUDA(cudaGraphInstantiate(&ready, graph, 0));
    cudaEvent_t begin = nullptr, end = nullptr;
    LLAISYS_CUDA(cudaEventCreate(&begin));
    LLAISYS_CUDA(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < replays + 2; ++i) {
        LLAISYS_CUDA(cudaEventRecord(begin, stream.stream));
        LLAISYS_CUDA(cudaGraphLaunch(ready, stream.stream));
        LLAISYS_CUDA(cudaEventRecord(end, stream.stream));
        LLAISYS_CUDA(cudaEventSynchronize(end));
        float milliseconds = 0;
        LLAISYS_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
        if (i >= 2) {
            times.push_back(milliseconds);
        }
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(ready);
    cudaGraphDestroy(graph);
    std::sort(times.begin(), times.end());
    return 1000.0 * times[times.size() / 2] / per_replay;
}

// A stage selected by name; without a name all usual stages run in order.
struct Stage {
    const char *name;
    bool is_usual;
    std::function<void(CudaStream &)> run;
};

// Exit status: 1 if anything failed or the name is unknown.
inline int run_stages(int argc, char **argv, const std::vector<Stage> &stages) {
    const std::string name = argc > 1 ? argv[1] : "";
    bool is_known = name.empty();
    try {
        CudaStream stream(0);
        for (const Stage &stage : stages) {
            if (name == stage.name || (name.empty() && stage.is_usual)) {
                is_known = true;
                stage.run(stream);
            }
        }
        if (!is_known) {
            report(false, "there is no stage " + name);
        }
    } catch (const std::exception &error) {
        report(false, error.what());
    }
    return failures() > 0 ? 1 : 0;
}

} // namespace check
