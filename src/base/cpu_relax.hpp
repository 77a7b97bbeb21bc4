// Pause instruction for spin loops.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace llaisys {

inline void cpu_relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory"); // `yield` is a no-op on most cores
#endif
}

} // namespace llaisys
