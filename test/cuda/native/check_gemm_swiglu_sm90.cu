// ops/cuda/gemm_swiglu_sm90.cuh and gemm_swiglu_m256.cuh against a naive reference over odd sizes and
// both dtypes, then times against the tensor core peak.
//
//   check_gemm_swiglu_sm90 [check|small|time]      default: check and time
#include "common.cuh"

#include "ops/cuda/gemm_swiglu_m256_config.cuh"
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

// units: tile size of gemm_swiglu_m256.cuh; 0: the other kernel.
template <typename T> void check_shape(CudaStream &stream, int m, int n, int k, int units = 0) {
    const int ldx = k + 8, ldo = n + 16;
    const Array<T> x(normal<T>(size_t(m) * size_t(ldx), 1)),
        w(normal<T>(size_t(2 * n * k), 2, 0.1f));
    const T *const gate = w.get(), *const up = gate + size_t(n) * size_t(k);
    Array<T> out(size_t(m * ldo));
    const Array<float> naive(size_t(m * n));
    const dim3 grid(unsigned((n + 127) / 128), unsigned(m));
    naive_kernel<T><<<grid, 128>>>(naive.get(), x.get(), ldx, gate, up, n, k);
    const auto want = naive.host();
    std::vector<double> expected(want.begin(), want.end());
    for (int run = 0; run < 2; ++run) {
        out.poison();
        if (units == 0) {
            run_gemm_swiglu_sm90<T>(stream, {x.get(), gate, up, out.get(), ldx, ldo, m, n, k});
        } else {
            run_gemm_swiglu_m256<T>(stream, {x.get(), gate, up, out.get(), ldx, ldo, m, n, k},
                                    units);
        }
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
               line("swiglu %s %d x %d x %d, %d units: relative %.2e, largest %.2e%s", name_of<T>(),
                    m, n, k, units, d.relative, d.largest,
                    is_outside_clean ? "" : ", wrote out of bounds"));
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
    for (const int units : kSwigluM256Units) {
        for (const int m : {1, 97, 128, 129, 200, 256}) {
            check_shape<T>(stream, m, 8, 8, units);
            check_shape<T>(stream, m, 1000, 264, units);
            check_shape<T>(stream, m, 136, 1544, units);
        }
    }
    check_shape<T>(stream, 250, 16000, 200, 5); // several rounds, fewer K tiles than stages
}

// Decode steps: every tile size, the chosen one first.
void time_m256(CudaStream &stream) {
    std::printf(
        "\ngate/up GEMM with SwiGLU of a decode step, bf16, microseconds (percent of the floor) "
        "by units per tile\n");
    for (const auto &[n, k] :
         {std::pair(4864, 896), std::pair(8192, 2048), std::pair(8960, 1536),
          std::pair(11008, 2048), std::pair(12288, 4096), std::pair(13824, 5120),
          std::pair(14336, 4096), std::pair(18944, 3584)}) {
        const size_t weights = size_t(2 * n) * size_t(k);
        const int copies = int(std::max<size_t>(2, (size_t(200) << 20) / weights)); // exceed L2
        const Array<bf16> w(weights * size_t(copies));
        fill(w.get(), w.size(), 2);
        for (const int m : {128, 256}) {
            const Array<bf16> x(size_t(m) * size_t(k)), out(size_t(m) * size_t(n));
            fill(x.get(), x.size(), 1);
            const double floor =
                std::max(2e6 * double(weights) / kReadBandwidth, 2e6 * m * double(weights) / kPeak);
            const int chosen = swiglu_m256_units(stream, m, n, k);
            std::printf("%3d rows, %5d outputs of %d: floor %6.1f ", m, n, k, floor);
            const auto time = [&](int units, int outputs, int width) {
                const double us = time_of(stream, std::max(8, copies), [&](int i) {
                    const bf16 *gate = w.get() + size_t(i % copies) * weights;
                    run_gemm_swiglu_m256<bf16>(stream,
                                               {x.get(), gate, gate + weights / 2, out.get(), width,
                                                outputs, m, outputs, width},
                                               units);
                });
                std::printf(" %d: %6.1f (%2.0f%%)", units, us, 100 * floor / us);
            };
            time(chosen, n, k);
            for (const int units : kSwigluM256Units) {
                if (units != chosen) {
                    time(units, n, k);
                }
            }
            std::printf("\n");
            std::fflush(stdout);
        }
    }
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
                    run_gemm_swiglu_sm90<bf16>(stream,
                                               {x.get(), w.get(), w.get() + size_t(n) * size_t(k),
                                                out.get(), k, 2 * n, m, n, k});
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
        check_shape<bf16>(stream, 140, 264, 200, 9);
    };
    return run_stages(argc, argv,
                      {{"check", true, check},
                       {"small", false, small},
                       {"time", true, time_all},
                       {"m256", true, time_m256}});
}
