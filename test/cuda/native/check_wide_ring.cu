// ops/cuda/wide_ring.cuh against a naive twin (every use, dtype, 1 to 96 rows, clusters of 1 to 8), whether a
// row's bits depend on the rows beside it, then times against the bytes of the weights.
//
//   check_wide_ring [check|small|time]      default: check and time
#include "few_rows_times.cuh"
#include "few_rows_twins.cuh"

#include "ops/cuda/wide_ring.cuh"

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

template <typename T> struct RunWide {
    WideTuning tuning{};
    template <typename Use>
    void operator()(CudaStream &stream, const FewRowsInput &in, const Use &use) const {
        run_wide_ring<T>(stream, in, use, tuning);
    }
};

template <typename T> void check_sizes(CudaStream &stream, int m) {
    constexpr const char *kName = "wide_ring";
    for (const int cluster : {1, 2, 4, 8}) {
        RunWide<T> run;
        run.tuning = {cluster, 64 << 10, 24 << 10, cluster == 4};
        // A part of a chunk; fewer chunks than blocks of a cluster; a ring that comes round.
        for (const auto &[k, n] : {std::pair(72, 16), std::pair(448, 208), std::pair(3208, 48)}) {
            check_rows<T>(stream, kName, run, m, k, n, false, false, false, true);
            check_rows<T>(stream, kName, run, m, k, n, false, true, true, true);
        }
        check_rows<T>(stream, kName, run, m, 128, 3584, false, true, false, true);
        check_swiglu<T>(stream, kName, run, m, 264, 1000, false);
        check_qkv<T>(stream, kName, run, m, 264, 7, 1, 64, false);
        check_qkv<T>(stream, kName, run, m, 136, 12, 2, 128, false);
        check_qkv<T>(stream, kName, run, m, 72, 20, 2, 128, false); // several copies a slot
    }
    const RunWide<T> run;
    if (m == 33) {
        check_swiglu<T>(stream, kName, run, m, 72, 9000, false); // several groups of warps
        check_rows<T>(stream, kName, run, m, 72, 48000, false, false, false, false); // rounds
    }
}

void time_all(CudaStream &stream) {
    std::printf(
        "\nas cut for a step: microseconds in a recorded chain of one product (percent of the "
        "floor: bytes over 4.39 TB/s)\n");
    for (const Shape &shape : kShapes) {
        if (shape.n > 100000) {
            continue; // the head is cuBLASLt's
        }
        const double floor = floor_of(shape);
        std::printf("%-14s %8.2f", shape.name, floor);
        for (const int m : {32, 64, 96}) {
            RunWide<bf16> run;
            run.tuning = shape.adds      ? wide_adding(m, shape.n, shape.k)
                         : shape.is_pair ? wide_mlp_input(m, shape.k)
                                         : wide_attention_input(m, shape.k);
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
        std::printf("wide_ring: %d failed\n", failures());
    };
    const auto small = [](CudaStream &stream) { // under a sanitizer
        RunWide<bf16> run;
        run.tuning.cluster = 4;
        check_rows<bf16>(stream, "wide_ring", run, 19, 1088, 208, false, true, false, true);
        check_qkv<bf16>(stream, "wide_ring", run, 33, 136, 4, 1, 64, false);
        check_swiglu<f16>(stream, "wide_ring", RunWide<f16>{}, 40, 264, 1000, false);
        check_swiglu<bf16>(stream, "wide_ring", RunWide<bf16>{}, 70, 264, 1000, false);
    };
    return run_stages(argc, argv,
                      {{"check", true, check}, {"time", true, time_all}, {"small", false, small}});
}
