// Small-M GEMMs timed against the bytes of their weights at the shapes of two models. The program
// passes the kernel as for gemm_small_m_reference.cuh.
#pragma once

#include "gemm_small_m_input.cuh"

#include "ops/decoder_layer/cuda_epilogues.cuh"

namespace check {

using namespace llaisys::ops::cuda;

struct Shape {
    const char *name;
    int n, k;
    bool norms, adds, is_pair; // is_pair: gate and up
};

inline constexpr Shape kShapes[] = {
    {"1.5B qkv", 2048, 1536, true, false, false},    {"1.5B o", 1536, 1536, false, true, false},
    {"1.5B gate/up", 8960, 1536, true, false, true}, {"1.5B down", 1536, 8960, false, true, false},
    {"1.5B head", 151936, 1536, true, false, false}, {"7B qkv", 4608, 3584, true, false, false},
    {"7B o", 3584, 3584, false, true, false},        {"7B gate/up", 18944, 3584, true, false, true},
    {"7B down", 3584, 18944, false, true, false},    {"7B head", 152064, 3584, true, false, false},
};

// Weights that exceed L2.
inline const bf16 *timed_weights() {
    static Array<bf16> weights(size_t(2200) << 20); // 4.4 GB
    static const bool is_filled = [] {
        fill(weights.get(), weights.size(), 17);
        return true;
    }();
    (void)is_filled;
    return weights.get();
}

inline LinearEpilogue<bf16> timed_rows(const Shape &shape, const bf16 *w, float *out) {
    LinearEpilogue<bf16> epilogue{};
    epilogue.w = w;
    epilogue.n = epilogue.ldo = shape.n;
    epilogue.k = shape.k;
    epilogue.bias = {nullptr, LLAISYS_DTYPE_F32};
    epilogue.out = {out, LLAISYS_DTYPE_F32};
    epilogue.adds = shape.adds;
    return epilogue;
}

// Microseconds per launch in a chain; launch(w): over the next weights.
template <typename Launch>
double time_chain(CudaStream &stream, const Shape &shape, const Launch &launch) {
    const size_t bytes = size_t(shape.n) * shape.k * 2 * (shape.is_pair ? 2 : 1);
    const int copies = int(std::max<size_t>(2, (size_t(400) << 20) / bytes));
    return time_of(stream, std::max(copies, 20),
                   [&](int i) { launch(timed_weights() + size_t(i % copies) * (bytes / 2)); });
}

template <typename Run>
double time_shape(CudaStream &stream, const Shape &shape, int m, const Run &run,
                  bool norms_inside = true) {
    const Input<bf16> input(m, shape.k, shape.norms, 3);
    Array<float> out32(size_t(m) * shape.n);
    Array<bf16> out16(size_t(m) * shape.n);
    out32.clear();
    GemmInput in = input.few(0, m);
    if (!shape.norms || !norms_inside) {
        in.residual = nullptr;
        in.x = input.on_x.get();
        in.ldx = input.ldx;
    }
    return time_chain(stream, shape, [&](const bf16 *w) {
        if (shape.is_pair) {
            run(stream, in,
                SwigluEpilogue<bf16>{w, w + size_t(shape.n) * shape.k, shape.n, shape.k,
                                     out16.get(), shape.n, 0});
        } else {
            run(stream, in, timed_rows(shape, w, out32.get()));
        }
    });
}

inline void print_time(int m, double us, double floor) {
    std::printf("  %2d rows %7.2f (%2.0f%%)", m, us, 100 * floor / us);
}

// As time_shape, for shapes and kernels that accumulate into f32 rows.
template <typename Run>
double time_adding(CudaStream &stream, const Shape &shape, int m, const Run &run) {
    const Input<bf16> input(m, shape.k, false, 3);
    Array<float> out(size_t(m) * shape.n);
    out.clear();
    return time_chain(stream, shape, [&](const bf16 *w) {
        run(stream, input.few(0, m), timed_rows(shape, w, out.get()));
    });
}

// The DRAM bound.
inline double floor_of(const Shape &shape) {
    return 1e6 * double(shape.n) * shape.k * 2 * (shape.is_pair ? 2 : 1) / kReadBandwidth;
}

} // namespace check
