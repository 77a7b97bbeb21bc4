// ops/cuda/gemv_sm90.cuh against a naive reference (all epilogues, both dtypes, odd sizes,
// several partitions), then times against the bytes of the weights.
//
//   check_gemv_sm90 [check|small|time]      default: check and time
#include "gemm_small_m_reference.cuh"
#include "gemm_small_m_timing.cuh"

#include "ops/cuda/gemm_small_m_bulk.cuh"
#include "ops/cuda/gemv_sm90.cuh"

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

constexpr const char *kName = "gemv_sm90";

template <typename T> struct RunGemv {
    GemvTuning tuning{};
    template <typename Epilogue>
    void operator()(CudaStream &stream, const GemmInput &in, const Epilogue &epilogue) const {
        run_gemv_sm90<T>(stream, in, epilogue, tuning);
    }
};

template <typename T> void check_all(CudaStream &stream, const RunGemv<T> &run) {
    for (const auto &[k, n] : {std::pair(8, 9), std::pair(64, 31), std::pair(520, 33),
                               std::pair(1032, 100), std::pair(1536, 257)}) {
        check_rows<T>(stream, kName, run, 1, k, n, false, false, true, true);
        check_rows<T>(stream, kName, run, 1, k, n, true, false, false, true);
        check_rows<T>(stream, kName, run, 1, k, n, false, true, false, true);
        check_rows<T>(stream, kName, run, 1, k, n, false, false, false, false);
    }
    check_rows<T>(stream, kName, run, 1, 8960, 1536, false, true, false, true);
    check_rows<T>(stream, kName, run, 1, 18944, 300, false, true, false, true);
    check_rows<T>(stream, kName, run, 1, 3584, 333, true, false, false, true);
    check_rows<T>(stream, kName, run, 1, 256, 40001, true, false, false, true); // many units
    // more units than threads
    check_rows<T>(stream, kName, run, 1, 256, 140001, true, false, true, true);
    check_swiglu<T>(stream, kName, run, 1, 1536, 301);
    check_swiglu<T>(stream, kName, run, 1, 2056, 2000);
    check_qkv<T>(stream, kName, run, 1, 1536, 12, 2, 128);
    check_qkv<T>(stream, kName, run, 1, 264, 7, 1, 64);
}

template <typename T> struct RunBulk {
    template <typename Epilogue>
    void operator()(CudaStream &stream, const GemmInput &in, Epilogue epilogue) const {
        epilogue.items = choose_unit_items(stream, epilogue.count());
        run_gemm_small_m_bulk<T>(stream, in, epilogue);
    }
};

void time_all(CudaStream &stream) {
    std::printf("\nmicroseconds in a captured graph (percent of the floor: bytes over 4.39 TB/s)\n"
                "%-14s %8s  gemv_sm90      gemm_small_m_bulk\n",
                "shape", "floor");
    for (const Shape &shape : kShapes) {
        const double floor = floor_of(shape);
        const double one = time_shape(stream, shape, 1, RunGemv<bf16>{});
        const double bulk = time_shape(stream, shape, 1, RunBulk<bf16>{});
        std::printf("%-14s %8.2f  %7.2f (%2.0f%%)  %7.2f (%2.0f%%)\n", shape.name, floor, one,
                    100 * floor / one, bulk, 100 * floor / bulk);
        std::fflush(stdout);
    }
}

} // namespace

int main(int argc, char **argv) {
    const auto check = [](CudaStream &stream) {
        check_all<bf16>(stream, {});
        check_all<f16>(stream, {});
        check_all<bf16>(stream, {{12, 3, 768, 3, 2}});
        check_all<f16>(stream, {{14, 14, 256, 2, 1000}});
        std::printf("one_row: %d failed\n", failures());
    };
    const auto small = [](CudaStream &stream) { // for compute-sanitizer
        const RunGemv<bf16> run;
        check_rows<bf16>(stream, kName, run, 1, 520, 33, false, true, true, true);
        check_rows<f16>(stream, kName, RunGemv<f16>{}, 1, 1032, 100, true, false, false, true);
        check_swiglu<bf16>(stream, kName, run, 1, 264, 301);
        check_qkv<bf16>(stream, kName, run, 1, 264, 7, 1, 64);
    };
    return run_stages(argc, argv,
                      {{"check", true, check}, {"time", true, time_all}, {"small", false, small}});
}
