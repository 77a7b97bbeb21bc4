// The kernels of a decode step as one CUDA graph, without the engine: time per step against the
// bytes read, and the share of each kernel (the graph without it). Random weights; results are
// checked by the other programs.
//
//   check_decode_step [time|many|tune|tune_many]      default: time and many
#include "decode_step.cuh"

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

void time_all(CudaStream &stream) {
    std::printf("\ndecode step on the device: ms, percent of the DRAM bound (4.39 TB/s); "
                "then the share of each "
                "kernel, us per layer\n");
    for (const Model &model : kModels) {
        for (const auto &[m, context] :
             {std::pair(1, 128), std::pair(1, 2048), std::pair(2, 1000), std::pair(4, 1000),
              std::pair(5, 200), std::pair(8, 1000), std::pair(16, 1000)}) {
            DecodeStep step(stream, model, m, context);
            const double all = step.time(kAllKernels);
            std::printf("%-5s %2d rows, context %4d: %.3f ms (%2.0f%%)", model.name, m, context,
                        all / 1e3, 100e6 * step.bytes() / kReadBandwidth / all);
            for (const auto &[kernel, name] : kNames) {
                const double without = step.time(kAllKernels & ~kernel);
                std::printf("  %s %.2f", name,
                            (all - without) / (kernel == head ? 1 : model.layers));
            }
            std::printf("\n");
            std::fflush(stdout);
        }
    }
}

void tune(CudaStream &stream) {
    struct Choice {
        size_t block, prefetch; // KB
    };
    constexpr Choice kNormed[] = {{0, 0}, {0, 36}, {75, 18}, {75, 36}, {150, 18}, {150, 36}};
    constexpr Choice kStreamed[] = {{0, 0}, {0, 36}, {0, 72}, {120, 54}, {170, 54}};
    std::printf("\ndecode step, ms; rows: KB per block (0: default) / KB prefetched (0: default) "
                "of GEMMs with a "
                "fused norm; "
                "columns: of the others\n");
    for (const Model &model : kModels) {
        for (const auto &[m, context] : {std::pair(1, 128), std::pair(8, 1000)}) {
            DecodeStep step(stream, model, m, context);
            for (const Choice &n : kNormed) {
                std::printf("%-5s %2d rows %3zu/%zu:", model.name, m, n.block, n.prefetch);
                for (const Choice &s : kStreamed) {
                    std::printf("  %zu/%zu %.3f", s.block, s.prefetch,
                                step.time(kAllKernels, {n.block * 1000, n.prefetch * 1000},
                                          {s.block * 1000, s.prefetch * 1000}) /
                                    1e3);
                }
                std::printf("\n");
                std::fflush(stdout);
            }
        }
    }
}

// More than 16 rows: default kernels, and cuBLASLt alone.
void time_many(CudaStream &stream) {
    std::printf("\nM 32 to 96, context 1000; then the same without gemm_tma_m96.cuh\n");
    for (const Model &model : kModels) {
        for (const int m : {32, 64, 96}) {
            DecodeStep step(stream, model, m, 1000);
            for (const M96Path &path : {M96Path::usual(model.hidden, model.inner, m), M96Path{}}) {
                const double all = step.time(kAllKernels, path);
                std::printf("%-5s %2d rows: %.3f ms (%2.0f%%)", model.name, m, all / 1e3,
                            100e6 * step.bytes() / kReadBandwidth / all);
                for (const auto &[kernel, name] : kNames) {
                    std::printf("  %s %.2f", name,
                                (all - step.time(kAllKernels & ~kernel, path)) /
                                    (kernel == head ? 1 : model.layers));
                }
                std::printf("\n");
                std::fflush(stdout);
            }
        }
    }
}

// Varies the tuning of one GEMM at a time.
void tune_many(CudaStream &stream) {
    std::printf(
        "\ndecode step, M 32 to 96, ms; blocks per cluster (0: cuBLASLt), KB of the pipeline / "
        "KB prefetched\n");
    for (const Model &model : kModels) {
        for (const int m : {32, 64, 96}) {
            DecodeStep step(stream, model, m, 1000);
            M96Path path = M96Path::usual(model.hidden, model.inner, m);
            std::printf("%-5s %d rows: default %.3f\n", model.name, m,
                        step.time(kAllKernels, path) / 1e3);
            const std::pair<M96Tuning *, const char *> products[] = {{&path.qkv, "qkv"},
                                                                     {&path.o, "o"},
                                                                     {&path.gate_up, "gate/up"},
                                                                     {&path.down, "down"}};
            for (const auto &[tuning, name] : products) {
                const M96Tuning usual = *tuning;
                std::printf("  %s:", name);
                for (const int cluster : {0, 1, 2, 4, 8}) {
                    for (const auto &[pipeline, prefetch] :
                         {std::pair(64, 32), std::pair(96, 32), std::pair(96, 96),
                          std::pair(128, 64), std::pair(170, 128), std::pair(205, 200)}) {
                        const bool is_pair = tuning == &path.gate_up;
                        if ((is_pair && cluster > 1) || (!is_pair && cluster == 1) ||
                            (cluster == 0 && pipeline > 64)) {
                            continue;
                        }
                        *tuning = {cluster, size_t(pipeline) << 10, size_t(prefetch) << 10};
                        if (!step.fits(path)) {
                            continue;
                        }
                        std::printf("  %d %d/%d %.3f", cluster, pipeline, prefetch,
                                    step.time(kAllKernels, path) / 1e3);
                        std::fflush(stdout);
                    }
                }
                std::printf("\n");
                *tuning = usual;
            }
        }
    }
}

} // namespace

int main(int argc, char **argv) {
    return run_stages(argc, argv,
                      {{"time", true, time_all},
                       {"tune", false, tune},
                       {"many", true, time_many},
                       {"tune_many", false, tune_many}});
}
