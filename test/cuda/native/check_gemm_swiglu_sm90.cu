// ops/cuda/gemm_swiglu_sm90.cuh against a naive reference over odd sizes and both dtypes, then
// times against the tensor core peak.
//
//   check_gemm_swiglu_sm90 [check|small|time]      default: check and time
#include "common.cuh"

#include "ops/cuda/gemm_swiglu_sm90.cuh"

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

template <typename T>
__global__ void naive_kernel(float *out, const T *x, int ldx, const T *gate, const T *up, int n,
                             int k) {
    const int output = blockIdx.x * blockDim.x + threadIdx.x;
    if (output >= n) {
        return;
    }
    double g = 0, u = 0;
    for (int i = 0; i < k; ++i) {
        const double value = to_float(x[int64_t(blockIdx.y) * ldx + i]);
        g += value * to_float(gate[int64_t(output) * k + i]);
        u += value * to_float(up[int64_t(output) * k + i]);
    }
    out[int64_t(blockIdx.y) * n + output] = float(u * g / (1 + exp(-g)));
}

template <typename T> void check_shape(CudaStream &stream, int m, int n, int k) {
    const int ldx = k + 8, ldo = n + 16;
    const Array<T> x(normal<T>(size_t(m) * size_t(ldx), 1)),
        gate(normal<T>(size_t(n * k), 2, 0.1f)), up(normal<T>(size_t(n * k), 3, 0.1f));
    Array<T> out(size_t(m * ldo));
    const Array<float> naive(size_t(m * n));
    const dim3 grid(unsigned((n + 127) / 128), unsigned(m));
    naive_kernel<T><<<grid, 128>>>(naive.get(), x.get(), ldx, gate.get(), up.get(), n, k);
    const auto want = naive.host();
    std::vector<double> expected(want.begin(), want.end());
    for (int run = 0; run < 2; ++run) {
        out.poison();
        run_gemm_swiglu_sm90<T>(stream, out.get(), ldo, x.get(), ldx, gate.get(), up.get(), m, n,
                                k);
        const auto all = out.host();
        std::vector<T> got;
        bool is_outside_clean = true;
        for (int r = 0; r < m; ++r) {
            got.insert(got.end(), all.begin() + r * ldo, all.begin() + r * ldo + n);
            for (int c = n; c < ldo; ++c) {
                is_outside_clean =
                    is_outside_clean && std::isnan(host_float(all[size_t(r * ldo + c)]));
            }
        }
        const Distance d = distance(got, expected);
        report(d.within(5e-3, 0.2) && is_outside_clean,
               line("swiglu %s %d x %d x %d: relative %.2e, largest %.2e%s", name_of<T>(), m, n, k,
                    d.relative, d.largest, is_outside_clean ? "" : ", wrote out of bounds"));
    }
}

template <typename T> void check_all(CudaStream &stream) {
    for (const int m : {1, 64, 129, 300, 1000}) {
        for (const int n : {8, 136, 512}) {
            for (const int k : {8, 64, 200, 1536}) {
                check_shape<T>(stream, m, n, k);
            }
        }
    }
    check_shape<T>(stream, 4600, 1000, 72); // two rasterization bands
}

void time_all(CudaStream &stream) {
    std::printf("\ngate/up GEMM with SwiGLU, bf16, microseconds (TFLOP/s, percent of 793)\n");
    for (const auto &shape : {std::pair(8960, 1536), std::pair(18944, 3584)}) {
        const int n = shape.first, k = shape.second;
        for (const int m : {512, 1024, 2048, 4000, 16384}) {
            const Array<bf16> x(size_t(m) * size_t(k)), w(size_t(2 * n) * size_t(k)),
                out(size_t(m) * size_t(2 * n));
            fill(x.get(), x.size(), 1);
            fill(w.get(), w.size(), 2);
            const double us = time_of(
                stream, 2,
                [&](int) {
                    run_gemm_swiglu_sm90<bf16>(stream, out.get(), 2 * n, x.get(), k, w.get(),
                                               w.get() + size_t(n) * size_t(k), m, n, k);
                },
                5);
            const double operations = 4.0 * m * n * k;
            std::printf("%5d rows, %5d outputs of %d: %8.1f (%4.0f, %3.0f%%)\n", m, n, k, us,
                        operations / us / 1e6, 100 * operations / us * 1e6 / kPeak);
            std::fflush(stdout);
        }
    }
}

} // namespace

int main(int argc, char **argv) {
    const auto check = [](CudaStream &stream) {
        check_all<bf16>(stream);
        check_all<f16>(stream);
        std::printf("swiglu: %d failed\n", failures());
    };
    const auto small = [](CudaStream &stream) { // for compute-sanitizer
        check_shape<bf16>(stream, 300, 136, 200);
        check_shape<f16>(stream, 129, 264, 1536);
    };
    return run_stages(argc, argv,
                      {{"check", true, check}, {"small", false, small}, {"time", true, time_all}});
}
