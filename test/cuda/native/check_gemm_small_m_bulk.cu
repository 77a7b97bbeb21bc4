// ops/cuda/gemm_small_m_bulk.cuh against a naive reference (all epilogues, both dtypes, M 1 to
// 16, odd sizes), batch invariance, programmatic edges in captured graphs, then times against the
// bytes of the weights.
//
//   check_gemm_small_m_bulk [check|small|time|tune|profile]      default: check and time
#include "gemm_small_m_reference.cuh"
#include "gemm_small_m_timing.cuh"

#include "ops/cuda/gemm_small_m.cuh"

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

template <typename T> struct RunBulk {
    BulkTuning tuning{};
    template <typename Epilogue>
    void operator()(CudaStream &stream, const GemmInput &in, Epilogue epilogue) const {
        epilogue.items = choose_unit_items(stream, epilogue.count());
        run_gemm_small_m_bulk<T>(stream, in, epilogue, tuning);
    }
};

template <typename T> void check_bulk(CudaStream &stream) {
    const RunBulk<T> run;
    constexpr const char *kName = "gemm_small_m_bulk";
    for (const int m : {1, 2, 3, 5, 8, 9, 16}) {
        for (const auto &[k, n] : {std::pair(8, 9), std::pair(64, 31), std::pair(520, 33),
                                   std::pair(1032, 100), std::pair(1536, 257)}) {
            check_rows<T>(stream, kName, run, m, k, n, false, false, true, true);
            check_rows<T>(stream, kName, run, m, k, n, true, false, false, true);
            check_rows<T>(stream, kName, run, m, k, n, false, true, false, true);
            check_rows<T>(stream, kName, run, m, k, n, false, false, false, false);
        }
        check_rows<T>(stream, kName, run, m, 8960, 1536, false, true, false, true);
        check_rows<T>(stream, kName, run, m, 3584, 333, true, false, false, true);
        check_rows<T>(stream, kName, run, m, 256, 40001, true, false, false, true); // many units
        check_swiglu<T>(stream, kName, run, m, 1536, 301);
        check_swiglu<T>(stream, kName, run, m, 2056, 2000);
        check_qkv<T>(stream, kName, run, m, 1536, 12, 2, 128);
        check_qkv<T>(stream, kName, run, m, 264, 7, 1, 64);
    }
}

// Counts the programmatic edges of a captured chain.
template <typename Run> void check_programmatic_edges(CudaStream &stream, const Run &run) {
    constexpr int kChain = 4;
    const Input<bf16> input(1, 1536, false, 1);
    Array<bf16> w(size_t(1536) * 1536);
    fill(w.get(), w.size(), 3);
    Array<float> out(1536);
    LinearEpilogue<bf16> epilogue{};
    epilogue.w = w.get();
    epilogue.n = epilogue.k = epilogue.ldo = 1536;
    epilogue.bias = {nullptr, LLAISYS_DTYPE_F32};
    epilogue.out = {out.get(), LLAISYS_DTYPE_F32};
    cudaGraph_t graph = nullptr;
    LLAISYS_CUDA(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kChain; ++i) {
        run(stream, input.few(0, 1), epilogue);
    }
    LLAISYS_CUDA(cudaStreamEndCapture(stream.stream, &graph));
    size_t n = 0;
    LLAISYS_CUDA(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &n));
    std::vector<cudaGraphNode_t> from(n), to(n);
    std::vector<cudaGraphEdgeData> data(n);
    LLAISYS_CUDA(cudaGraphGetEdges(graph, from.data(), to.data(), data.data(), &n));
    size_t programmatic = 0;
    for (const cudaGraphEdgeData &edge : data) {
        programmatic += edge.type == cudaGraphDependencyTypeProgrammatic ? 1 : 0;
    }
    cudaGraphDestroy(graph);
    report(n == kChain - 1 && programmatic == n,
           line("captured chain of %d launches: %zu edges, %zu programmatic", kChain, n,
                programmatic));
}

constexpr int kTimedRows[] = {1, 2, 4, 8, 12, 16};

template <typename Run>
void time_line(CudaStream &stream, const Shape &shape, const char *kernel, const Run &run,
               bool norms_inside = true) {
    const double floor = floor_of(shape);
    std::printf("%-14s %8.2f  %-16s", shape.name, floor, kernel);
    for (const int m : kTimedRows) {
        const double us = time_shape(stream, shape, m, run, norms_inside);
        std::printf("  %7.2f (%2.0f%%)", us, 100 * floor / us);
    }
    std::printf("\n");
    std::fflush(stdout);
}

void time_all(CudaStream &stream) {
    std::printf(
        "\nmicroseconds in a captured graph (percent of the floor: bytes over 4.39 TB/s)\n");
    std::printf("%-14s %8s  %-16s", "shape", "floor", "rows");
    for (const int m : kTimedRows) {
        std::printf("  %7d      ", m);
    }
    std::printf("\n");
    for (const Shape &shape : kShapes) {
        time_line(stream, shape, "bulk", RunBulk<bf16>{});
        if (shape.norms) { // as called by `linear`
            time_line(stream, shape, "bulk, 16-bit x", RunBulk<bf16>{}, false);
        }
    }
}

void tune_bulk(CudaStream &stream) {
    struct Choice {
        int block, prefetch; // KB per block, KB prefetched
    };
    constexpr Choice kChoices[] = {{113, 18}, {113, 36}, {113, 72}, {75, 36}, {150, 36}, {220, 36}};
    for (const int m : {1, 8}) {
        std::printf("\ngemm_small_m_bulk m=%d, microseconds by KB per block / KB prefetched\n%-14s",
                    m, "shape");
        for (const Choice &c : kChoices) {
            std::printf(" %5d/%2d", c.block, c.prefetch);
        }
        std::printf("\n");
        for (const Shape &shape : kShapes) {
            std::printf("%-14s", shape.name);
            for (const Choice &c : kChoices) {
                const RunBulk<bf16> run{{size_t(c.block) * 1000, size_t(c.prefetch) * 1000}};
                std::printf(" %8.2f", time_shape(stream, shape, m, run));
            }
            std::printf("\n");
            std::fflush(stdout);
        }
    }
}

} // namespace

int main(int argc, char **argv) {
    const auto check = [](CudaStream &stream) {
        check_programmatic_edges(stream, RunBulk<bf16>{});
        check_bulk<bf16>(stream);
        check_bulk<f16>(stream);
        std::printf("gemm_small_m_bulk: %d failed\n", failures());
    };
    const auto small = [](CudaStream &stream) { // for compute-sanitizer
        const RunBulk<bf16> run;
        check_rows<bf16>(stream, "gemm_small_m_bulk", run, 3, 520, 33, false, true, true, true);
        check_rows<f16>(stream, "gemm_small_m_bulk", RunBulk<f16>{}, 8, 1032, 100, true, false,
                        false, true);
        check_rows<bf16>(stream, "gemm_small_m_bulk", run, 5, 2056, 33, true, false, false, true);
        check_swiglu<bf16>(stream, "gemm_small_m_bulk", run, 2, 264, 301);
        check_qkv<bf16>(stream, "gemm_small_m_bulk", run, 5, 264, 7, 1, 64);
    };
    const auto profile = [](CudaStream &stream) { // one launch each, without a graph
        for (const Shape &shape : kShapes) {
            time_shape(stream, shape, 1, RunBulk<bf16>{});
        }
    };
    return run_stages(argc, argv,
                      {{"check", true, check},
                       {"time", true, time_all},
                       {"small", false, small},
                       {"tune", false, tune_bulk},
                       {"profile", false, profile}});
}
