// ops/cuda/one_row.cuh against a naive twin (every use, dtype, odd sizes, ways of cutting the work), then
// times against the bytes of the weights.
//
//   check_one_row [check|small|time]      default: check and time
#include "few_rows_times.cuh"
#include "few_rows_twins.cuh"

#include "ops/cuda/one_row.cuh"
#include "ops/cuda/row_ring.cuh"

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

constexpr const char *kName = "one_row";

template <typename T> struct RunOne {
    OneRowTuning tuning{};
    template <typename Use>
    void operator()(CudaStream &stream, const FewRowsInput &in, const Use &use) const {
        run_one_row<T>(stream, in, use, tuning);
    }
};

template <typename T> void check_all(CudaStream &stream, const RunOne<T> &run) {
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
    check_rows<T>(stream, kName, run, 1, 256, 140001, true, false, true, true); // more than threads
    check_swiglu<T>(stream, kName, run, 1, 1536, 301);
    check_swiglu<T>(stream, kName, run, 1, 2056, 2000);
    check_qkv<T>(stream, kName, run, 1, 1536, 12, 2, 128);
    check_qkv<T>(stream, kName, run, 1, 264, 7, 1, 64);
}

template <typename T> struct RunRing {
    template <typename Use>
    void operator()(CudaStream &stream, const FewRowsInput &in, Use use) const {
        use.items = items_of_unit(stream, use.count());
        run_row_ring<T>(stream, in, use);
    }
};

void time_all(CudaStream &stream) {
    std::printf("\nmicroseconds in a recorded chain (percent of the floor: bytes over 4.39 TB/s)\n"
                "%-14s %8s  one_row        row_ring\n",
                "shape", "floor");
    for (const Shape &shape : kShapes) {
        const double floor = floor_of(shape);
        const double one = time_shape(stream, shape, 1, RunOne<bf16>{});
        const double ring = time_shape(stream, shape, 1, RunRing<bf16>{});
        std::printf("%-14s %8.2f  %7.2f (%2.0f%%)  %7.2f (%2.0f%%)\n", shape.name, floor, one,
                    100 * floor / one, ring, 100 * floor / ring);
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
    const auto small = [](CudaStream &stream) { // under a sanitizer
        const RunOne<bf16> run;
        check_rows<bf16>(stream, kName, run, 1, 520, 33, false, true, true, true);
        check_rows<f16>(stream, kName, RunOne<f16>{}, 1, 1032, 100, true, false, false, true);
        check_swiglu<bf16>(stream, kName, run, 1, 264, 301);
        check_qkv<bf16>(stream, kName, run, 1, 264, 7, 1, 64);
    };
    return run_stages(argc, argv,
                      {{"check", true, check}, {"time", true, time_all}, {"small", false, small}});
}
