// What the naive references of the operators are written with: random tensors, plain element access in
// double, comparison, and a loop over the instruction sets of this machine. To be included once.
#pragma once

#include "check.hpp"

#include "device/cpu/amx.hpp"
#include "device/cpu/probes.hpp"
#include "ops/cpu/kernels.hpp"
#include "ops/cpu/quant_kernels.hpp"
#include "ops/cpu/strip_kernels.hpp"
#include "ops/rearrange/op.hpp"
#include "tensor/tensor.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace ops_test {

using namespace llaisys;
using device::Isa;
using device::Stream;

constexpr DType kF32 = LLAISYS_DTYPE_F32;
constexpr DType kF16 = LLAISYS_DTYPE_F16;
constexpr DType kBf16 = LLAISYS_DTYPE_BF16;
constexpr DType kI32 = LLAISYS_DTYPE_I32;
constexpr DType kI64 = LLAISYS_DTYPE_I64;
constexpr DType kReal[] = {kF32, kF16, kBf16};
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline std::mt19937 &generator() {
    static std::mt19937 engine(20261115);
    return engine;
}

inline int64_t random_int(int64_t low, int64_t high) { // inclusive
    return std::uniform_int_distribution<int64_t>(low, high)(generator());
}

inline Stream &one_thread() {
    static Stream stream(LLAISYS_DEVICE_CPU, 0, 1);
    return stream;
}
inline Stream &two_threads() {
    static Stream stream(LLAISYS_DEVICE_CPU, 0, 2);
    return stream;
}
inline Stream &three_threads() {
    static Stream stream(LLAISYS_DEVICE_CPU, 0, 3);
    return stream;
}
inline Stream *const *all_streams() {
    static Stream *const streams[] = {&one_thread(), &two_threads(), &three_threads()};
    return streams;
}

// Runs body once for each instruction set that this machine has, with and without the bf16 products
// of AVX-512: tile registers, dot products.
template <typename Body> void for_each_isa(const Body &body) {
    struct Variant {
        Isa isa;
        bool tiles;
        bool bf16_dot;
        const char *name;
    };
    for (const Variant &v :
         {Variant{Isa::portable, false, false, "portable"},
          Variant{Isa::neon, false, false, "NEON"}, Variant{Isa::avx2, false, false, "AVX2"},
          Variant{Isa::avx512, false, false, "AVX-512"},
          Variant{Isa::avx512, false, true, "AVX-512 with BF16"},
          Variant{Isa::avx512, true, true, "AMX"}}) {
        device::allow_amx(v.tiles);
        ops::cpu::use_bf16_dot(v.bf16_dot);
        if (!ops::cpu::use_kernels_of(v.isa) || (v.tiles && !device::has_amx()) ||
            (v.bf16_dot && !v.tiles && !device::probes::has_bf16())) {
            continue;
        }
        const int before = check::failures();
        body();
        if (check::failures() != before) {
            std::fprintf(stderr, "  ... with the kernels for %s\n", v.name);
        }
    }
    device::allow_amx(true);
    ops::cpu::use_bf16_dot(device::probes::has_fast_bf16());
    ops::cpu::use_kernels_of(device::cpu_isa());
}

// The same for kernels of quantized weights: also without the machine's dot product of bytes.
template <typename Body> void for_each_byte_isa(const Body &body) {
    for_each_isa(body);
    if (device::probes::has_i8()) {
        device::allow_amx(false);
        ops::cpu::allow_byte_dot(false);
        body();
        ops::cpu::allow_byte_dot(true);
        device::allow_amx(true);
    }
}

// ---- tensors --------------------------------------------------------------------------------

inline double get(const Tensor &tensor, int64_t offset) {
    return visit_real(tensor.dtype(), [&](auto type) {
        return double(to_f32(tensor.as<decltype(type)>()[offset]));
    });
}
inline double get2(const Tensor &t, int64_t i, int64_t j) {
    return get(t, i * t.stride(0) + j * t.stride(1));
}
inline double get3(const Tensor &t, int64_t i, int64_t j, int64_t k) {
    return get(t, i * t.stride(0) + j * t.stride(1) + k * t.stride(2));
}
inline void set(const Tensor &tensor, int64_t offset, float value) {
    visit_real(tensor.dtype(), [&](auto type) {
        using T = decltype(type);
        tensor.as<T>()[offset] = from_f32<T>(value);
    });
}

inline Tensor random_tensor(const Shape &shape, DType dtype, float range = 1.0f) {
    Tensor tensor = Tensor::create(shape, dtype);
    std::uniform_real_distribution<float> values(-range, range);
    for (int64_t i = 0; i < tensor.elements(); ++i) {
        set(tensor, i, values(generator()));
    }
    return tensor;
}

// The same shape seen inside a larger tensor: the first dimension is padded, and starts at an
// address that no vector is aligned to.
inline Tensor random_strided(const Shape &shape, DType dtype, float range = 1.0f) {
    Shape padded = shape;
    const int last = shape.ndim() - 1;
    padded[last] += 5;
    return random_tensor(padded, dtype, range).slice(last, 3, 3 + shape[last]);
}

inline Tensor i32_tensor(const std::vector<int32_t> &values) {
    Tensor tensor = Tensor::create({int64_t(values.size())}, kI32);
    std::copy(values.begin(), values.end(), tensor.as<int32_t>());
    return tensor;
}
inline Tensor i64_tensor(const std::vector<int64_t> &values) {
    Tensor tensor = Tensor::create({int64_t(values.size())}, kI64);
    std::copy(values.begin(), values.end(), tensor.as<int64_t>());
    return tensor;
}

// Error that rounding to the dtype may add.
inline double unit_of(DType dtype) {
    return dtype == kF32 ? 1e-6 : dtype == kF16 ? 1.0 / 1024 : 1.0 / 128;
}

inline void check_close(const char *what, double got, double expected, double tolerance) {
    const bool both_nan = std::isnan(got) && std::isnan(expected);
    if (!both_nan && !(got == expected) && !(std::abs(got - expected) <= tolerance)) {
        check::report(__FILE__, __LINE__,
                      text(what, ": got ", got, ", expected ", expected, " within ", tolerance));
    }
}

inline bool same_bits(const Tensor &a, const Tensor &b) {
    const Tensor x = ops::contiguous(one_thread(), a);
    const Tensor y = ops::contiguous(one_thread(), b);
    return x.bytes() == y.bytes() && std::memcmp(x.data(), y.data(), size_t(x.bytes())) == 0;
}

} // namespace ops_test
