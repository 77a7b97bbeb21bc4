#include "ops/rope/op.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

namespace {

constexpr int64_t kAngles = 128; // pairs rotated at a time

struct Rotation {
    const Tensor &out;
    const Tensor &in;
};

// Rotates pairs [first, first + n) of every head of token i; the angles are shared by the heads.
void rope_pairs(const cpu::Kernels &kernels, const Tensor &out, const Tensor &in, int64_t i,
                int64_t first, int64_t n, const float *cos, const float *sin) {
    float low[kAngles];
    float high[kAngles];
    const int64_t half = in.size(2) / 2;
    for (int64_t h = 0; h < in.size(1); ++h) {
        const cpu::Values from = cpu::row_of(in, i, h).from(first);
        const cpu::Values to = cpu::row_of(out, i, h).from(first);
        const float *a = cpu::read(kernels, from, low, n);
        const float *b = cpu::read(kernels, from.from(half), high, n);
        float *out_low = cpu::target(to, low);
        float *out_high = cpu::target(to.from(half), high);
        kernels.rotate(out_low, out_high, a, b, cos, sin, n);
        cpu::finish(kernels, to, out_low, n);
        cpu::finish(kernels, to.from(half), out_high, n);
    }
}

// All tensors have the same tokens and d.
void rotate(const device::Stream &stream, std::initializer_list<Rotation> rotations,
            const Tensor &positions, const Tensor &inv_freq, float factor) {
    const int64_t n = positions.size(0);
    const int64_t d = 2 * inv_freq.size(0);
    int64_t heads = 0;
    for (const Rotation &rotation : rotations) {
        heads += rotation.in.size(1);
    }
    const cpu::Kernels &kernels = cpu::kernels();
    cpu::for_rows(stream, n, heads * d + 4 * d, [&](int64_t first, int64_t last) {
        float cos[kAngles];
        float sin[kAngles];
        for (int64_t i = first; i < last; ++i) {
            for (int64_t p = 0; p < d / 2; p += kAngles) {
                const int64_t pairs = std::min(kAngles, d / 2 - p);
                kernels.angles(cos, sin, positions.as<int64_t>()[i], inv_freq.as<float>() + p,
                               pairs);
                for (int64_t j = 0; factor != 1.0f && j < pairs; ++j) {
                    const float times = inv_freq.as<float>()[p + j] != 0 ? factor : 1.0f;
                    cos[j] *= times;
                    sin[j] *= times;
                }
                for (const Rotation &rotation : rotations) {
                    rope_pairs(kernels, rotation.out, rotation.in, i, p, pairs, cos, sin);
                }
            }
        }
    });
}

} // namespace

void rope_cpu(const device::Stream &stream, const Tensor &out, const Tensor &in,
              const Tensor &positions, const Tensor &inv_freq, float factor) {
    rotate(stream, {{out, in}}, positions, inv_freq, factor);
}

void rope_both_cpu(const device::Stream &stream, const Tensor &q, const Tensor &k,
                   const Tensor &positions, const Tensor &inv_freq, float factor) {
    rotate(stream, {{q, q}, {k, k}}, positions, inv_freq, factor);
}

} // namespace llaisys::ops
