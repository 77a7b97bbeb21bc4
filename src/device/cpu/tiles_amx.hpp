// Tile registers of AMX. Included by *_amx.cpp, whose namespace LLAISYS_CPU_NS it joins; see
// tiles.hpp for the names.
#pragma once

#include "device/cpu/tiles.hpp"

namespace llaisys::LLAISYS_CPU_NS {

struct AmxTiles {
    static void configure(const TileShapes &shapes) {
        struct alignas(64) {
            uint8_t palette = 1;
            uint8_t start_row = 0;
            uint8_t reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        static_assert(sizeof config == 64);
        for (int t = 0; t < kTiles; ++t) {
            config.row_bytes[t] = uint16_t(shapes.row_bytes[t]);
            config.rows[t] = uint8_t(shapes.rows[t]);
        }
        asm volatile("ldtilecfg %0" : : "m"(config));
    }
    static void release() { asm volatile("tilerelease"); }

    template <int t> static void zero() { asm volatile("tilezero %%tmm%c0" : : "i"(t)); }
    template <int t> static void load(const void *p, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(t) : "memory");
    }
    template <int t> static void store(void *p, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(t) : "memory");
    }
    template <int c, int a, int b> static void dot_bytes() {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
    template <int c, int a, int b> static void dot_signed_unsigned() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
    template <int c, int a, int b> static void dot_bf16() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
    }
};

} // namespace llaisys::LLAISYS_CPU_NS
