// ops/cuda/skinny.cuh against a naive twin (every use and dtype, 1 to 16 rows, norms of one, odd sizes), with the shared memory of
// devices that have it for their products: those of compute capability 8, which have 163 or 99 KB a block.
//
//   check_skinny [check|small|time]      default: check and time
#include "few_rows_times.cuh"
#include "few_rows_twins.cuh"

#include "ops/cuda/skinny.cuh"

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

constexpr const char *kName = "skinny";

void as_of_8(CudaStream &stream, int shared_kb) {
    stream.has_early_launch = false;
    stream.max_shared_bytes = shared_kb << 10;
}

template <typename T> struct RunSkinny {
    template <typename Use>
    void operator()(CudaStream &stream, const FewRowsInput &in, Use use) const {
        use.items = items_of_unit(stream, use.count());
        run_skinny<T>(stream, in, use);
    }
};

template <typename T> void check_all(CudaStream &stream) {
    const RunSkinny<T> run;
    for (const int m : {1, 2, 7, 8, 9, 16}) {
        for (const auto &[k, n] : {std::pair(8, 9), std::pair(520, 33), std::pair(1536, 257)}) {
            check_rows<T>(stream, kName, run, m, k, n, false, true, true, true);
            check_rows<T>(stream, kName, run, m, k, n, false, false, false, false);
        }
        check_rows<T>(stream, kName, run, m, 8960, 300, false, true, false, true);
    }
    check_rows<T>(stream, kName, run, 1, 18944, 300, false, true, false, true);
    check_rows<T>(stream, kName, run, 1, 40960, 100, false, true, false, true); // as one of several
    check_rows<T>(stream, kName, run, 1, 3584, 333, true, false, false, true);
    check_swiglu<T>(stream, kName, run, 1, 1536, 301);
    check_qkv<T>(stream, kName, run, 1, 264, 7, 1, 64);
}

void time_all(CudaStream &stream) {
    as_of_8(stream, 99);
    std::printf("\nmicroseconds in a recorded chain: 1, 8, 16 rows of 16 bits\n");
    for (const Shape &shape : kShapes) {
        std::printf("%-14s", shape.name);
        for (const int m : {1, 8, 16}) {
            std::printf(" %7.2f", time_shape(stream, shape, m, RunSkinny<bf16>{}, false));
        }
        std::printf("\n");
        std::fflush(stdout);
    }
}

} // namespace

int main(int argc, char **argv) {
    const auto check = [](CudaStream &stream) {
        for (const int shared_kb : {163, 99}) {
            as_of_8(stream, shared_kb);
            check_all<bf16>(stream);
            check_all<f16>(stream);
        }
        std::printf("skinny: %d failed\n", failures());
    };
    const auto small = [](CudaStream &stream) { // under a sanitizer
        as_of_8(stream, 99);
        check_rows<bf16>(stream, kName, RunSkinny<bf16>{}, 3, 520, 33, false, true, true, true);
        check_rows<f16>(stream, kName, RunSkinny<f16>{}, 16, 264, 33, false, true, true, true);
        check_rows<bf16>(stream, kName, RunSkinny<bf16>{}, 1, 520, 33, true, false, false, true);
        check_swiglu<f16>(stream, kName, RunSkinny<f16>{}, 1, 520, 33);
        check_qkv<bf16>(stream, kName, RunSkinny<bf16>{}, 1, 264, 7, 1, 64);
    };
    return run_stages(argc, argv,
                      {{"check", true, check}, {"small", false, small}, {"time", true, time_all}});
}
