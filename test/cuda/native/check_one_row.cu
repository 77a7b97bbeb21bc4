// ops/cuda/one_row.cuh against a naive twin (every use, dtype, odd sizes, ways of cutting the work), then
// times against the bytes of the weights.
//
//   check_one_row [check|small|time]      default: check and time
#include "few_rows_twins.cuh"

#include "ops/cuda/one_row.cuh"
#include "ops/cuda/row_ring.cuh"

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

constexpr double kReadBandwidth = 4.39e12; // of an H200, as measured
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

struct Shape {
    const char *name;
    int n, k;
    bool norms, adds, is_pair; // pair: gate and up
};

constexpr Shape kShapes[] = {
    {"1.5B qkv", 2048, 1536, true, false, false},    {"1.5B o", 1536, 1536, false, true, false},
    {"1.5B gate/up", 8960, 1536, true, false, true}, {"1.5B down", 1536, 8960, false, true, false},
    {"1.5B head", 151936, 1536, true, false, false}, {"7B qkv", 4608, 3584, true, false, false},
    {"7B o", 3584, 3584, false, true, false},        {"7B gate/up", 18944, 3584, true, false, true},
    {"7B down", 3584, 18944, false, true, false},    {"7B head", 152064, 3584, true, false, false},
};

// Microseconds of one launch in a chain over weights that no cache holds.
double time_shape(CudaStream &stream, const Shape &shape, bool by_ring) {
    const size_t bytes = size_t(shape.n) * shape.k * 2 * (shape.is_pair ? 2 : 1);
    const int copies = int(std::max<size_t>(2, (size_t(400) << 20) / bytes));
    static Array<bf16> weights(size_t(2200) << 20); // 4.4 GB
    static bool is_filled = false;
    if (!is_filled) {
        fill(weights.get(), weights.size(), 17);
        is_filled = true;
    }
    const Input<bf16> input(1, shape.k, shape.norms, 3);
    Array<float> out32(size_t(shape.n));
    Array<bf16> out16(size_t(shape.n));
    LLAISYS_CUDA(cudaMemset(out32.get(), 0, out32.size() * 4));
    const auto run = [&](auto use) {
        use.items = items_of_unit(stream, use.count());
        by_ring ? run_row_ring<bf16>(stream, input.few(0, 1), use)
                : run_one_row<bf16>(stream, input.few(0, 1), use);
    };
    return time_of(stream, std::max(copies, 20), [&](int i) {
        const bf16 *w = weights.get() + size_t(i % copies) * (bytes / 2);
        if (shape.is_pair) {
            run(SwigluUse<bf16>{w, w + size_t(shape.n) * shape.k, shape.n, shape.k, out16.get(),
                                shape.n, 0});
        } else {
            StoreRows<bf16> use{};
            use.w = w;
            use.n = use.ldo = shape.n;
            use.k = shape.k;
            use.bias = {nullptr, LLAISYS_DTYPE_F32};
            use.out = {out32.get(), LLAISYS_DTYPE_F32};
            use.adds = shape.adds;
            run(use);
        }
    });
}

void time_all(CudaStream &stream) {
    std::printf("\nmicroseconds in a recorded chain (percent of the floor: bytes over 4.39 TB/s)\n"
                "%-14s %8s  one_row        row_ring\n",
                "shape", "floor");
    for (const Shape &shape : kShapes) {
        const double floor =
            1e6 * double(shape.n) * shape.k * 2 * (shape.is_pair ? 2 : 1) / kReadBandwidth;
        const double one = time_shape(stream, shape, false);
        const double ring = time_shape(stream, shape, true);
        std::printf("%-14s %8.2f  %7.2f (%2.0f%%)  %7.2f (%2.0f%%)\n", shape.name, floor, one,
                    100 * floor / one, ring, 100 * floor / ring);
        std::fflush(stdout);
    }
}

} // namespace

int main(int argc, char **argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    try {
        CudaStream stream(0);
        if (what.empty() || what == "check") {
            check_all<bf16>(stream, {});
            check_all<f16>(stream, {});
            check_all<bf16>(stream, {{12, 3, 768, 3, 2}});
            check_all<f16>(stream, {{16, 16, 256, 2, 1000}});
            std::printf("one_row: %d failed\n", failures());
        }
        if (what.empty() || what == "time") {
            time_all(stream);
        }
        if (what == "small") { // under a sanitizer
            const RunOne<bf16> run;
            check_rows<bf16>(stream, kName, run, 1, 520, 33, false, true, true, true);
            check_rows<f16>(stream, kName, RunOne<f16>{}, 1, 1032, 100, true, false, false, true);
            check_swiglu<bf16>(stream, kName, run, 1, 264, 301);
            check_qkv<bf16>(stream, kName, run, 1, 264, 7, 1, 64);
        }
    } catch (const std::exception &error) {
        report(false, error.what());
    }
    return failures() > 0 ? 1 : 0;
}
