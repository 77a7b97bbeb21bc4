// Tile registers in plain C++, for kernels that are written for those of the machine. Included after
// the simd_*.hpp of the test's own namespace.
#pragma once

#include "base/dtype.hpp"
#include "device/cpu/tiles.hpp"

#include <cstdlib>
#include <cstring>

namespace llaisys::LLAISYS_CPU_NS {

struct EmulatedTiles {
    static inline TileShapes shapes;
    static inline bool is_configured = false;
    static inline unsigned char memory[kTiles][16][64];

    static void configure(const TileShapes &wanted) {
        for (int t = 0; t < kTiles; ++t) {
            need(wanted.rows[t] >= 0 && wanted.rows[t] <= 16);
            need(wanted.row_bytes[t] >= 0 && wanted.row_bytes[t] <= 64);
        }
        shapes = wanted;
        is_configured = true;
        std::memset(memory, 0, sizeof memory);
    }
    static void release() { is_configured = false; }

    template <int t> static void zero() {
        use<t>();
        std::memset(memory[t], 0, sizeof memory[t]);
    }
    template <int t> static void load(const void *p, int64_t stride) {
        zero<t>();
        for (int r = 0; r < shapes.rows[t]; ++r) {
            std::memcpy(memory[t][r], static_cast<const char *>(p) + r * stride,
                        size_t(shapes.row_bytes[t]));
        }
    }
    template <int t> static void store(void *p, int64_t stride) {
        use<t>();
        for (int r = 0; r < shapes.rows[t]; ++r) {
            std::memcpy(static_cast<char *>(p) + r * stride, memory[t][r],
                        size_t(shapes.row_bytes[t]));
        }
    }
    template <int c, int a, int b> static void dot_bytes() { dot_integers<c, a, b, int8_t>(); }
    template <int c, int a, int b> static void dot_signed_unsigned() {
        dot_integers<c, a, b, uint8_t>();
    }
    template <int c, int a, int b, typename B> static void dot_integers() {
        check_shapes<c, a, b>();
        for (int r = 0; r < shapes.rows[c]; ++r) {
            for (int n = 0; n < shapes.row_bytes[c] / 4; ++n) {
                int32_t sum = at<int32_t>(c, r, n);
                for (int k = 0; k < shapes.row_bytes[a]; ++k) {
                    sum += int32_t(at<int8_t>(a, r, k)) * at<B>(b, k / 4, 4 * n + k % 4);
                }
                std::memcpy(memory[c][r] + 4 * n, &sum, sizeof sum);
            }
        }
    }
    template <int c, int a, int b> static void dot_bf16() {
        check_shapes<c, a, b>();
        for (int r = 0; r < shapes.rows[c]; ++r) {
            for (int n = 0; n < shapes.row_bytes[c] / 4; ++n) {
                float sums[2] = {0.0f, 0.0f}; // even and odd k
                for (int k = 0; k < shapes.row_bytes[a] / 2; ++k) {
                    sums[k % 2] +=
                        to_f32(at<bf16_t>(a, r, k)) * to_f32(at<bf16_t>(b, k / 2, 2 * n + k % 2));
                }
                const float sum = at<float>(c, r, n) + (sums[0] + sums[1]);
                std::memcpy(memory[c][r] + 4 * n, &sum, sizeof sum);
            }
        }
    }

private:
    static void need(bool condition) {
        if (!condition) {
            std::abort(); // where the machine would stop the program
        }
    }
    template <int t> static void use() {
        need(is_configured && shapes.rows[t] > 0 && shapes.row_bytes[t] > 0);
    }
    template <int c, int a, int b> static void check_shapes() {
        static_assert(c != a && c != b && a != b);
        use<c>(), use<a>(), use<b>();
        need(shapes.rows[c] == shapes.rows[a] && shapes.row_bytes[c] == shapes.row_bytes[b] &&
             shapes.row_bytes[a] == 4 * shapes.rows[b]);
    }
    template <typename T> static T at(int t, int r, int i) {
        T value;
        std::memcpy(&value, memory[t][r] + size_t(i) * sizeof(T), sizeof value);
        return value;
    }
};

} // namespace llaisys::LLAISYS_CPU_NS
