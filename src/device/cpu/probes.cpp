#include "device/cpu/probes.hpp"

#include "base/check.hpp"
#include "device/cpu/amx.hpp"
#include "device/cpu/isa.hpp"
#include "device/runtime.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace llaisys {

// Each is defined in the file of its instruction set, where the build has it.
namespace cpu_portable {
extern const device::ProbeKernels probe_kernels;
}
namespace cpu_avx2 {
extern const device::ProbeKernels probe_kernels;
}
namespace cpu_avx512 {
extern const device::ProbeKernels probe_kernels;
}
namespace cpu_neon {
extern const device::ProbeKernels probe_kernels;
}

} // namespace llaisys

namespace llaisys::device {

namespace {

constexpr size_t kReadBytes = size_t(256) << 20;
constexpr int kRepeats = 15;
constexpr int64_t kRounds = 1 << 20;

const ProbeKernels &kernels() {
    switch (cpu_isa()) {
#if defined(LLAISYS_HAVE_AVX2)
    case Isa::avx2:
        return cpu_avx2::probe_kernels;
#endif
#if defined(LLAISYS_HAVE_AVX512)
    case Isa::avx512:
        return cpu_avx512::probe_kernels;
#endif
#if defined(LLAISYS_HAVE_NEON)
    case Isa::neon:
        return cpu_neon::probe_kernels;
#endif
    default:
        return cpu_portable::probe_kernels;
    }
}

// Keeps a result alive without a store.
void keep(float value) {
    static std::atomic<float> sink;
    sink.store(value, std::memory_order_relaxed);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Removes these bytes from every cache of the machine, where a program can.
void evict(const float *data, size_t n) {
    constexpr size_t kLine = 64 / sizeof(float);
    for (size_t i = 0; i < n; i += kLine) {
#if defined(__x86_64__)
        _mm_clflush(data + i);
#elif defined(__aarch64__)
        asm volatile("dc civac, %0" : : "r"(data + i) : "memory");
#endif
    }
}

// Shortest time of body(chunk) with one chunk per thread, `before` running in between.
template <typename Body, typename Before>
double best_seconds(ThreadPool &pool, int64_t n_chunks, const Body &body, const Before &before) {
    double best = 1e30;
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
        pool.run(n_chunks, [&](int64_t chunk, int) { before(chunk); });
        const auto start = std::chrono::steady_clock::now();
        pool.run(n_chunks, [&](int64_t chunk, int) { body(chunk); });
        best = std::min(best, seconds_since(start));
    }
    return best;
}

// From DRAM: without eviction, the L3 of a server would keep much of what is read again.
double measure_read(ThreadPool &pool) {
    const Runtime &runtime = cpu_runtime();
    float *data = static_cast<float *>(runtime.allocate(0, kReadBytes, Lifetime::temporary));
    const size_t n = kReadBytes / sizeof(float);
    std::fill(data, data + n, 1.0f); // commits pages other than the shared zero page
    const int64_t n_chunks = int64_t(pool.size()) * 16;
    const size_t part = n / size_t(n_chunks);
    const double seconds = best_seconds(
        pool, n_chunks,
        [&](int64_t chunk) { keep(kernels().read(data + size_t(chunk) * part, part)); },
        [&](int64_t chunk) { evict(data + size_t(chunk) * part, part); });
    runtime.release(0, data, kReadBytes, Lifetime::temporary);
    return double(part * size_t(n_chunks) * sizeof(float)) / seconds;
}

// Runs a number of rounds; returns the operations of one round.
using Rounds = float (*)(int64_t rounds, int64_t *operations_per_round);

float f32_rounds(int64_t rounds, int64_t *operations) {
    *operations = kernels().f32_operations;
    return kernels().f32(rounds);
}

// Null where the machine has no such instruction.
Rounds rounds_of(Probe probe) {
    switch (probe) {
    case Probe::f32:
        return f32_rounds;
    case Probe::f16:
        return probes::has_f16() ? probes::f16_rounds : nullptr;
    case Probe::i8:
#if defined(LLAISYS_HAVE_AMX)
        if (uses_amx()) {
            return probes::tile_i8_rounds;
        }
#endif
        return probes::has_i8() ? probes::i8_rounds : nullptr;
    case Probe::bf16:
#if defined(LLAISYS_HAVE_AMX)
        if (uses_amx()) {
            return probes::tile_bf16_rounds;
        }
#endif
        return probes::has_fast_bf16() ? probes::bf16_rounds : nullptr;
    case Probe::read_bandwidth:
        break;
    }
    return nullptr;
}

} // namespace

double measure(ThreadPool &pool, Probe probe) {
    if (probe == Probe::read_bandwidth) {
        return measure_read(pool);
    }
    const Rounds run = rounds_of(probe);
    if (run == nullptr) {
        return 0;
    }
    const int64_t threads = pool.size();
    int64_t operations = 0;
    run(1, &operations);
    const auto rounds = [&](int64_t) {
        int64_t unused;
        keep(run(kRounds, &unused));
    };
    const double seconds = best_seconds(pool, threads, rounds, [](int64_t) {});
    return double(operations) * double(kRounds) * double(threads) / seconds;
}

} // namespace llaisys::device
