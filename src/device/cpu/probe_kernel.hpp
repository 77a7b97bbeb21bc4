// Included by each probes_<isa>.cpp after its simd_<isa>.hpp.
#pragma once

#include "device/cpu/probes.hpp"
#include "device/cpu/simd.hpp"

namespace llaisys::LLAISYS_CPU_NS {

// Eight streams of loads keep enough requests in flight.
inline float probe_read(const float *data, size_t n) {
    constexpr size_t kStep = 8 * size_t(kLanes);
    vf sums[8];
#pragma GCC unroll 8
    for (size_t j = 0; j < 8; ++j) {
        sums[j] = zero();
    }
    // The prefetch distance of the kernels; hardware prefetching alone is not sufficient.
    constexpr size_t kAhead = size_t(kStreamBytes) / sizeof(float);
    for (size_t i = 0; i + kStep <= n; i += kStep) {
        for (size_t line = 0; line < kStep; line += 16) {
            __builtin_prefetch(data + i + line + kAhead);
        }
#pragma GCC unroll 8
        for (size_t j = 0; j < 8; ++j) {
            sums[j] = add(sums[j], load(data + i + j * size_t(kLanes)));
        }
    }
    vf total = zero();
#pragma GCC unroll 8
    for (size_t j = 0; j < 8; ++j) {
        total = add(total, sums[j]);
    }
    return reduce_add(total);
}

// Independent chains of multiply-adds, enough to hide the latency of the instruction. A chain goes
// through the addend, the operand that every instruction set writes in place. The loops are
// unrolled early so that the chains stay in registers.
constexpr int64_t kChains = 12;

inline float probe_f32(int64_t rounds) {
    const vf factor = set1(0.999f);
    const vf term = set1(0.001f);
    vf chain[kChains];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kChains; ++i) {
        chain[i] = set1(float(i));
    }
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < kChains; ++i) {
            if constexpr (kIsa ==
                          device::Isa::portable) {      // a product and a sum: both operands must
                chain[i] = fma(chain[i], factor, term); // change in every round
            } else {
                chain[i] = fma(factor, term, chain[i]);
            }
        }
    }
    vf total = zero();
#pragma GCC unroll 16
    for (int64_t i = 0; i < kChains; ++i) {
        total = add(total, chain[i]);
    }
    return reduce_add(total);
}

constexpr device::ProbeKernels make_probe_kernels() {
    device::ProbeKernels kernels{};
    kernels.read = probe_read;
    kernels.f32 = probe_f32;
    kernels.f32_operations = 2 * kChains * int64_t(kLanes);
    return kernels;
}

extern const device::ProbeKernels probe_kernels;
const device::ProbeKernels probe_kernels = make_probe_kernels();

} // namespace llaisys::LLAISYS_CPU_NS
