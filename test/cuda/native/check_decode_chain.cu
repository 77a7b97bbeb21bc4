// The kernels of a decode step as one recorded graph, without an engine around them: what a token costs on
// the device, against the bytes it must read, and what of it each kernel is worth (the same chain without
// it). Random weights; the results are not looked at, other programs check the kernels.
//
//   check_decode_chain [time|many|tune|tune_many]      default: time and many
#include "decode_chain.cuh"

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

void time_all(CudaStream &stream) {
    std::printf("\na decode step on the device: ms, percent of the floor (bytes over 4.39 TB/s); "
                "then what each "
                "kernel is worth, us a layer\n");
    for (const Model &model : kModels) {
        for (const auto &[m, context] :
             {std::pair(1, 128), std::pair(1, 2048), std::pair(2, 1000), std::pair(4, 1000),
              std::pair(5, 200), std::pair(8, 1000), std::pair(16, 1000)}) {
            Chain chain(stream, model, m, context);
            const double all = chain.time(kAllKernels);
            std::printf("%-5s %2d rows, context %4d: %.3f ms (%2.0f%%)", model.name, m, context,
                        all / 1e3, 100e6 * chain.bytes() / kReadBandwidth / all);
            for (const auto &[kernel, name] : kNames) {
                const double without = chain.time(kAllKernels & ~kernel);
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
        size_t block, early; // KB
    };
    constexpr Choice kNormed[] = {{0, 0}, {0, 36}, {75, 18}, {75, 36}, {150, 18}, {150, 36}};
    constexpr Choice kStreamed[] = {{0, 0}, {0, 36}, {0, 72}, {120, 54}, {170, 54}};
    std::printf(
        "\na decode step, ms; lines: KB a block (0: as it runs) / before the input (likewise) of "
        "products that normalise; "
        "columns: of the others\n");
    for (const Model &model : kModels) {
        for (const auto &[m, context] : {std::pair(1, 128), std::pair(8, 1000)}) {
            Chain chain(stream, model, m, context);
            for (const Choice &n : kNormed) {
                std::printf("%-5s %2d rows %3zu/%zu:", model.name, m, n.block, n.early);
                for (const Choice &s : kStreamed) {
                    std::printf("  %zu/%zu %.3f", s.block, s.early,
                                chain.time(kAllKernels, {n.block * 1000, n.early * 1000},
                                           {s.block * 1000, s.early * 1000}) /
                                    1e3);
                }
                std::printf("\n");
                std::fflush(stdout);
            }
        }
    }
}

// Of more than 16 rows: as it runs, and by cuBLASLt alone.
void time_many(CudaStream &stream) {
    std::printf("\nthe same of more rows, context 1000; without wide_ring.cuh\n");
    for (const Model &model : kModels) {
        for (const int m : {32, 64, 96}) {
            Chain chain(stream, model, m, 1000);
            for (const WideRoad &road :
                 {WideRoad::usual(model.hidden, model.inner, m), WideRoad{}}) {
                const double all = chain.time(kAllKernels, road);
                std::printf("%-5s %2d rows: %.3f ms (%2.0f%%)", model.name, m, all / 1e3,
                            100e6 * chain.bytes() / kReadBandwidth / all);
                for (const auto &[kernel, name] : kNames) {
                    std::printf("  %s %.2f", name,
                                (all - chain.time(kAllKernels & ~kernel, road)) /
                                    (kernel == head ? 1 : model.layers));
                }
                std::printf("\n");
                std::fflush(stdout);
            }
        }
    }
}

// One product after the other cut in other ways, the others as they run.
void tune_many(CudaStream &stream) {
    std::printf(
        "\na decode step of more rows, ms; blocks of a cluster (0: cuBLASLt), KB of the ring / "
        "before the input\n");
    for (const Model &model : kModels) {
        for (const int m : {32, 64, 96}) {
            Chain chain(stream, model, m, 1000);
            WideRoad road = WideRoad::usual(model.hidden, model.inner, m);
            std::printf("%-5s %d rows: as it runs %.3f\n", model.name, m,
                        chain.time(kAllKernels, road) / 1e3);
            const std::pair<WideTuning *, const char *> products[] = {{&road.qkv, "qkv"},
                                                                      {&road.o, "o"},
                                                                      {&road.gate_up, "gate/up"},
                                                                      {&road.down, "down"}};
            for (const auto &[tuning, name] : products) {
                const WideTuning usual = *tuning;
                std::printf("  %s:", name);
                for (const int cluster : {0, 1, 2, 4, 8}) {
                    for (const auto &[ring, early] :
                         {std::pair(64, 32), std::pair(96, 32), std::pair(96, 96),
                          std::pair(128, 64), std::pair(170, 128), std::pair(205, 200)}) {
                        const bool is_pair = tuning == &road.gate_up;
                        if ((is_pair && cluster > 1) || (!is_pair && cluster == 1) ||
                            (cluster == 0 && ring > 64)) {
                            continue;
                        }
                        *tuning = {cluster, size_t(ring) << 10, size_t(early) << 10};
                        if (!chain.fits(road)) {
                            continue;
                        }
                        std::printf("  %d %d/%d %.3f", cluster, ring, early,
                                    chain.time(kAllKernels, road) / 1e3);
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
