// ops/cuda/gemm_small_m_sm80.cuh against a naive reference (all epilogues, both dtypes, M 1 to
// 16, fused norm for M = 1, odd sizes), limited to the shared memory of compute capability 8 (163
// or 99 KB per block).
//
//   check_gemm_small_m_sm80 [check|small|time]      default: check and time
#include "gemm_small_m_reference.cuh"
#include "gemm_small_m_timing.cuh"

#include "ops/cuda/gemm_small_m_sm80.cuh"

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

constexpr const char *kName = "gemm_small_m_sm80";

void limit_to_sm80(CudaStream &stream, int shared_kb) {
    stream.has_pdl = false;
    stream.max_shared_bytes = shared_kb << 10;
}

template <typename T> struct RunSm80 {
    template <typename Epilogue>
    void operator()(CudaStream &stream, const GemmInput &in, Epilogue epilogue) const {
        epilogue.items = choose_unit_items(stream, epilogue.count());
        run_gemm_small_m_sm80<T>(stream, in, epilogue);
    }
};

template <typename T> void check_all(CudaStream &stream) {
    const RunSm80<T> run;
    for (const int m : {1, 2, 7, 8, 9, 16}) {
        for (const auto &[k, n] : {std::pair(8, 9), std::pair(520, 33), std::pair(1536, 257)}) {
            check_rows<T>(stream, kName, run, m, k, n, false, true, true, true);
            check_rows<T>(stream, kName, run, m, k, n, false, false, false, false);
        }
        check_rows<T>(stream, kName, run, m, 8960, 300, false, true, false, true);
    }
    check_rows<T>(stream, kName, run, 1, 18944, 300, false, true, false, true);
    // too long for the one-row kernel
    check_rows<T>(stream, kName, run, 1, 40960, 100, false, true, false, true);
    check_rows<T>(stream, kName, run, 1, 3584, 333, true, false, false, true);
    check_swiglu<T>(stream, kName, run, 1, 1536, 301);
    check_qkv<T>(stream, kName, run, 1, 264, 7, 1, 64);
}

void time_all(CudaStream &stream) {
    limit_to_sm80(stream, 99);
    std::printf("\nmicroseconds in a captured graph: M = 1, 8, 16, 16-bit x\n");
    for (const Shape &shape : kShapes) {
        std::printf("%-14s", shape.name);
        for (const int m : {1, 8, 16}) {
            std::printf(" %7.2f", time_shape(stream, shape, m, RunSm80<bf16>{}, false));
        }
        std::printf("\n");
        std::fflush(stdout);
    }
}

} // namespace

int main(int argc, char **argv) {
    const auto check = [](CudaStream &stream) {
        for (const int shared_kb : {163, 99}) {
            limit_to_sm80(stream, shared_kb);
            check_all<bf16>(stream);
            check_all<f16>(stream);
        }
        std::printf("gemm_small_m_sm80: %d failed\n", failures());
    };
    const auto small = [](CudaStream &stream) { // for compute-sanitizer
        limit_to_sm80(stream, 99);
        check_rows<bf16>(stream, kName, RunSm80<bf16>{}, 3, 520, 33, false, true, true, true);
        check_rows<f16>(stream, kName, RunSm80<f16>{}, 16, 264, 33, false, true, true, true);
        check_rows<bf16>(stream, kName, RunSm80<bf16>{}, 1, 520, 33, true, false, false, true);
        check_swiglu<f16>(stream, kName, RunSm80<f16>{}, 1, 520, 33);
        check_qkv<bf16>(stream, kName, RunSm80<bf16>{}, 1, 264, 7, 1, 64);
    };
    return run_stages(argc, argv,
                      {{"check", true, check}, {"small", false, small}, {"time", true, time_all}});
}
