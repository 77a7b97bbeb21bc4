// ops/cuda/gemm_tma_splitk.cuh against a naive reference (both dtypes, M 1 to 16, clusters of 2,
// 4 and 8), independence of a row from the other rows, then times against the bytes of the
// weights.
//
//   check_gemm_tma_splitk [check|small|time]      default: check and time
#include "gemm_small_m_reference.cuh"
#include "gemm_small_m_timing.cuh"

#include "ops/cuda/gemm_tma_splitk.cuh"

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

template <typename T> struct RunSplitK {
    SplitKTuning tuning{};
    void operator()(CudaStream &stream, const GemmInput &in,
                    const LinearEpilogue<T> &epilogue) const {
        run_gemm_tma_splitk<T>(stream,
                               {in.x, in.ldx, epilogue.w, in.m, int(epilogue.n), in.k,
                                static_cast<float *>(epilogue.out.data), epilogue.ldo,
                                epilogue.adds},
                               tuning);
    }
};

template <typename T> void check_sizes(CudaStream &stream, int m) {
    for (const int cluster : {0, 2, 4, 8}) {
        RunSplitK<T> run;
        run.tuning.cluster = cluster;
        // Fewer K tiles than blocks of a cluster; splits of different lengths; a pipeline that
        // wraps around.
        for (const auto &[k, n] :
             {std::pair(64, 16), std::pair(448, 208), std::pair(1088, 1536), std::pair(9600, 48)}) {
            if (cluster > 0 || m <= 8) { // otherwise a single row has another config
                check_rows<T>(stream, "gemm_tma_splitk", run, m, k, n, false, false, false, true);
            }
            check_rows<T>(stream, "gemm_tma_splitk", run, m, k, n, false, true, false, true);
        }
    }
    check_rows<T>(stream, "gemm_tma_splitk", RunSplitK<T>{}, m, 256, 3584, false, true, false,
                  true);
    check_rows<T>(stream, "gemm_tma_splitk", RunSplitK<T>{}, m, 256, 3584, false, false, false,
                  true);
}

void time_all(CudaStream &stream) {
    std::printf(
        "\nmicroseconds in a captured graph (percent of the floor: bytes over 4.39 TB/s)\n");
    for (const Shape &shape : kShapes) {
        if (!shape.adds) {
            continue;
        }
        const double floor = floor_of(shape);
        std::printf("%-14s %8.2f", shape.name, floor);
        for (const int m : {2, 4, 8, 12, 16}) {
            print_time(m, time_adding(stream, shape, m, RunSplitK<bf16>{}), floor);
        }
        std::printf("\n");
        std::fflush(stdout);
    }
}

} // namespace

int main(int argc, char **argv) {
    const auto check = [](CudaStream &stream) {
        for (const int m : {1, 3, 8, 9, 16}) {
            check_sizes<bf16>(stream, m);
            check_sizes<f16>(stream, m);
        }
        std::printf("gemm_tma_splitk: %d failed\n", failures());
    };
    const auto small = [](CudaStream &stream) { // for compute-sanitizer
        check_rows<bf16>(stream, "gemm_tma_splitk", RunSplitK<bf16>{}, 3, 1088, 208, false, true,
                         false, true);
        check_rows<f16>(stream, "gemm_tma_splitk", RunSplitK<f16>{}, 12, 448, 3584, false, false,
                        false, true);
    };
    return run_stages(argc, argv,
                      {{"check", true, check}, {"time", true, time_all}, {"small", false, small}});
}
