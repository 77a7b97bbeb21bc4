// Microbenchmarks that measure the limits of this machine, against which kernels are compared.
#pragma once

#include "device/cpu/thread_pool.hpp"
#include "device/runtime.hpp"

#include <cstddef>
#include <cstdint>

namespace llaisys::device {

// Best of several rounds with all threads of the pool; 0 when the machine has no such instruction.
// Takes up to three seconds; read_bandwidth needs 256 MiB of memory.
double measure(ThreadPool &pool, Probe probe);

// The versions of one instruction set. Each returns a value that depends on all its work.
struct ProbeKernels {
    float (*read)(const float *data, size_t n);
    float (*f32)(int64_t rounds);
    int64_t f32_operations; // of one round
};

namespace probes {
// Operations of one round of each; run only where the machine has the instructions.
constexpr int64_t kRoundChains = 16;
float f16_rounds(int64_t rounds, int64_t *operations_per_round);
float i8_rounds(int64_t rounds, int64_t *operations_per_round);
float bf16_rounds(int64_t rounds, int64_t *operations_per_round);
#if defined(LLAISYS_HAVE_AMX)
float tile_bf16_rounds(int64_t rounds, int64_t *operations_per_round);
float tile_i8_rounds(int64_t rounds, int64_t *operations_per_round);
#endif
bool has_f16();
bool has_i8();
bool has_bf16(); // dot products of pairs, which the kernels of *_avx512bf16.cpp need
// Whether these are faster than products in f32. AMD's cores (Zen 4, Zen 5) take two pairs in the
// time of one multiply-add, Intel's take half a pair.
bool has_fast_bf16();
} // namespace probes

} // namespace llaisys::device
