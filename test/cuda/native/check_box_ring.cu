// ops/cuda/box_ring.cuh against a naive twin (dtypes, 1 to 16 rows, clusters of 2, 4 and 8), whether a row's bits
// depend on the rows beside it, then times against the bytes of the weights.
//
//   check_box_ring [check|small|time]      default: check and time
#include "few_rows_times.cuh"
#include "few_rows_twins.cuh"

#include "ops/cuda/box_ring.cuh"

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

template <typename T> struct RunBoxes {
    BoxTuning tuning{};
    void operator()(CudaStream &stream, const FewRowsInput &in, const StoreRows<T> &use) const {
        run_box_ring<T>(stream,
                        {in.x, in.ldx, use.w, in.m, int(use.n), in.k,
                         static_cast<float *>(use.out.data), use.ldo, use.adds},
                        tuning);
    }
};

template <typename T> void check_sizes(CudaStream &stream, int m) {
    for (const int cluster : {0, 2, 4, 8}) {
        RunBoxes<T> run;
        run.tuning.cluster = cluster;
        // Fewer chunks than blocks of a cluster; parts of different lengths; a ring that comes round.
        for (const auto &[k, n] :
             {std::pair(64, 16), std::pair(448, 208), std::pair(1088, 1536), std::pair(9600, 48)}) {
            if (cluster > 0 || m <= 8) { // else a row alone is cut in another way
                check_rows<T>(stream, "box_ring", run, m, k, n, false, false, false, true);
            }
            check_rows<T>(stream, "box_ring", run, m, k, n, false, true, false, true);
        }
    }
    check_rows<T>(stream, "box_ring", RunBoxes<T>{}, m, 256, 3584, false, true, false, true);
    check_rows<T>(stream, "box_ring", RunBoxes<T>{}, m, 256, 3584, false, false, false, true);
}

void time_all(CudaStream &stream) {
    std::printf(
        "\nmicroseconds in a recorded chain (percent of the floor: bytes over 4.39 TB/s)\n");
    for (const Shape &shape : kShapes) {
        if (!shape.adds) {
            continue;
        }
        const double floor = floor_of(shape);
        std::printf("%-14s %8.2f", shape.name, floor);
        for (const int m : {2, 4, 8, 12, 16}) {
            print_time(m, time_adding(stream, shape, m, RunBoxes<bf16>{}), floor);
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
        std::printf("box_ring: %d failed\n", failures());
    };
    const auto small = [](CudaStream &stream) { // under a sanitizer
        check_rows<bf16>(stream, "box_ring", RunBoxes<bf16>{}, 3, 1088, 208, false, true, false,
                         true);
        check_rows<f16>(stream, "box_ring", RunBoxes<f16>{}, 12, 448, 3584, false, false, false,
                        true);
    };
    return run_stages(argc, argv,
                      {{"check", true, check}, {"time", true, time_all}, {"small", false, small}});
}
