// ops/cuda/gemm_tma_m96.cuh against a naive reference (all epilogues, both dtypes, M 1 to 96,
// clusters of 1 to 8), independence of a row from the other rows, then times against the bytes of
// the weights.
//
//   check_gemm_tma_m96 [check|small|time]      default: check and time
#include "gemm_small_m_reference.cuh"
#include "gemm_small_m_timing.cuh"

#include "ops/cuda/gemm_tma_m96.cuh"

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

template <typename T> struct RunM96 {
    M96Tuning tuning{};
    template <typename Epilogue>
    void operator()(CudaStream &stream, const GemmInput &in, const Epilogue &epilogue) const {
        run_gemm_tma_m96<T>(stream, in, epilogue, tuning);
    }
};

template <typename T> void check_sizes(CudaStream &stream, int m) {
    constexpr const char *kName = "gemm_tma_m96";
    for (const int cluster : {1, 2, 4, 8}) {
        RunM96<T> run;
        run.tuning = {cluster, 64 << 10, 24 << 10, cluster == 4};
        // A partial K tile; fewer K tiles than blocks of a cluster; a pipeline that wraps around.
        for (const auto &[k, n] : {std::pair(72, 16), std::pair(448, 208), std::pair(3208, 48)}) {
            check_rows<T>(stream, kName, run, m, k, n, false, false, false, true);
            check_rows<T>(stream, kName, run, m, k, n, false, true, true, true);
        }
        check_rows<T>(stream, kName, run, m, 128, 3584, false, true, false, true);
        check_swiglu<T>(stream, kName, run, m, 264, 1000, false);
        check_qkv<T>(stream, kName, run, m, 264, 7, 1, 64, false);
        check_qkv<T>(stream, kName, run, m, 136, 12, 2, 128, false);
        check_qkv<T>(stream, kName, run, m, 72, 20, 2, 128, false); // several loads per stage
    }
    const RunM96<T> run;
    if (m == 33) {
        check_swiglu<T>(stream, kName, run, m, 72, 9000, false); // several consumer warpgroups
        // several waves
        check_rows<T>(stream, kName, run, m, 72, 48000, false, false, false, false);
    }
}

void time_all(CudaStream &stream) {
    std::printf("\ndefault tuning: microseconds in a captured graph of one GEMM (percent of the "
                "floor: bytes over 4.39 TB/s)\n");
    for (const Shape &shape : kShapes) {
        if (shape.n > 100000) {
            continue; // the LM head uses cuBLASLt
        }
        const double floor = floor_of(shape);
        std::printf("%-14s %8.2f", shape.name, floor);
        for (const int m : {32, 64, 96}) {
            RunM96<bf16> run;
            run.tuning = shape.adds      ? m96_residual_tuning(m, shape.n, shape.k)
                         : shape.is_pair ? m96_gate_up_tuning(m, shape.k)
                                         : m96_qkv_tuning(m, shape.k);
            if (run.tuning.cluster == 0) {
                std::printf("  %2d rows: cuBLASLt", m);
                continue;
            }
            print_time(m, time_shape(stream, shape, m, run, false), floor);
        }
        std::printf("\n");
        std::fflush(stdout);
    }
}

} // namespace

int main(int argc, char **argv) {
    const auto check = [](CudaStream &stream) {
        for (const int m : {1, 17, 32, 33, 64, 65, 96}) {
            check_sizes<bf16>(stream, m);
            check_sizes<f16>(stream, m);
        }
        std::printf("gemm_tma_m96: %d failed\n", failures());
    };
    const auto small = [](CudaStream &stream) { // for compute-sanitizer
        RunM96<bf16> run;
        run.tuning.cluster = 4;
        check_rows<bf16>(stream, "gemm_tma_m96", run, 19, 1088, 208, false, true, false, true);
        check_qkv<bf16>(stream, "gemm_tma_m96", run, 33, 136, 4, 1, 64, false);
        check_swiglu<f16>(stream, "gemm_tma_m96", RunM96<f16>{}, 40, 264, 1000, false);
        check_swiglu<bf16>(stream, "gemm_tma_m96", RunM96<bf16>{}, 70, 264, 1000, false);
    };
    return run_stages(argc, argv,
                      {{"check", true, check}, {"time", true, time_all}, {"small", false, small}});
}
