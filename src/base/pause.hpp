// What a loop that waits for another thread does between two looks.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace llaisys {

inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory"); // `yield` is a no-op on most cores
#endif
}

} // namespace llaisys
