// wgmma: asynchronous warpgroup MMA (four warps, 64 rows) of compute capability 9.0. Needs the
// architecture 90a. Compiled for other architectures the wrappers do nothing and must not be
// executed.
//
// Shared memory operands are tiles of 64 columns of 16-bit values: rows of 128 bytes, swizzle
// atoms of 8 rows (1,024 bytes, 1,024-byte aligned), 16-byte chunk c of row r stored at chunk c ^
// (r % 8) (128-byte swizzle). The same tile serves both major orders:
//
//   K-major     k_major_descriptor(tile + 2 * k bytes): k along a row, atoms 1,024 bytes apart
//   MN-major    mn_major_descriptor(tile + 128 * k bytes, step): k down the rows, atoms 1,024 bytes
//               apart; the next 64 columns are `step` bytes further
//
// Accumulator layout as in mma.m16n8k16: lane l of warp w holds rows 16 w + l / 4 (acc[4 j],
// acc[4 j + 1]) and 8 rows below (acc[4 j + 2], acc[4 j + 3]), columns 8 j + l % 4 * 2 and the
// next.
#pragma once

#include "ops/cuda/common.cuh"

namespace llaisys::ops::cuda {

// Whether this build and device have wgmma.
inline bool has_wgmma(const device::CudaStream &stream) {
#if defined(LLAISYS_HAVE_SM90A)
    return stream.device_major == 9 && stream.compute_major == 9;
#else
    (void)stream;
    return false;
#endif
}

// Byte offset of 16-byte chunk `chunk` (0 to 7) of row `row` in a tile of 64 columns.
__device__ __forceinline__ uint32_t swizzle_128b(int row, int chunk) {
    return uint32_t(row * 128 + ((chunk ^ (row & 7)) << 4));
}

__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t leading,
                                                     uint32_t stride) {
    constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t((leading & 0x3ffff) >> 4) << 16 |
           uint64_t((stride & 0x3ffff) >> 4) << 32 | kSwizzle128;
}
__device__ __forceinline__ uint64_t k_major_descriptor(uint32_t address) {
    return wgmma_descriptor(address, 16, 1024); // the leading offset is ignored for K-major
}
__device__ __forceinline__ uint64_t mn_major_descriptor(uint32_t address, uint32_t step) {
    return wgmma_descriptor(address, step, 1024);
}

// wgmma.fence: all four warps, before the first wgmma after its registers were written.
__device__ __forceinline__ void wgmma_fence() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit_group() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// wgmma.wait_group: waits until at most `Pending` groups are in flight.
template <int Pending> __device__ __forceinline__ void wgmma_wait_group() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#endif
}
// Compiler barrier on accumulators: keeps their uses behind the preceding wait_group.
template <int N> __device__ __forceinline__ void fence_operands(float (&acc)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        asm volatile("" : "+f"(acc[i])::"memory");
    }
}
// fence.proxy.async: makes this thread's shared memory stores visible to wgmma and TMA once a
// barrier is passed.
__device__ __forceinline__ void fence_proxy_async() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// setmaxnreg: registers per thread from here on; every warp of the warpgroup.
template <int Count> __device__ __forceinline__ void setmaxnreg_inc() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
#endif
}
template <int Count> __device__ __forceinline__ void setmaxnreg_dec() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
#endif
}

#define LLAISYS_REGS_4 "%0,%1,%2,%3"
#define LLAISYS_REGS_8 LLAISYS_REGS_4 ",%4,%5,%6,%7"
#define LLAISYS_REGS_16 LLAISYS_REGS_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define LLAISYS_REGS_24 LLAISYS_REGS_16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define LLAISYS_REGS_32 LLAISYS_REGS_24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define LLAISYS_REGS_40 LLAISYS_REGS_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define LLAISYS_REGS_48 LLAISYS_REGS_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define LLAISYS_REGS_56 LLAISYS_REGS_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define LLAISYS_REGS_64 LLAISYS_REGS_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define LLAISYS_REGS_72 LLAISYS_REGS_64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define LLAISYS_REGS_80 LLAISYS_REGS_72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define LLAISYS_REGS_88 LLAISYS_REGS_80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define LLAISYS_REGS_96 LLAISYS_REGS_88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define LLAISYS_ACC_AT(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LLAISYS_ACC_4(d) LLAISYS_ACC_AT(d, 0)
#define LLAISYS_ACC_8(d) LLAISYS_ACC_4(d), LLAISYS_ACC_AT(d, 4)
#define LLAISYS_ACC_16(d) LLAISYS_ACC_8(d), LLAISYS_ACC_AT(d, 8), LLAISYS_ACC_AT(d, 12)
#define LLAISYS_ACC_24(d) LLAISYS_ACC_16(d), LLAISYS_ACC_AT(d, 16), LLAISYS_ACC_AT(d, 20)
#define LLAISYS_ACC_32(d) LLAISYS_ACC_24(d), LLAISYS_ACC_AT(d, 24), LLAISYS_ACC_AT(d, 28)
#define LLAISYS_ACC_40(d) LLAISYS_ACC_32(d), LLAISYS_ACC_AT(d, 32), LLAISYS_ACC_AT(d, 36)
#define LLAISYS_ACC_48(d) LLAISYS_ACC_40(d), LLAISYS_ACC_AT(d, 40), LLAISYS_ACC_AT(d, 44)
#define LLAISYS_ACC_56(d) LLAISYS_ACC_48(d), LLAISYS_ACC_AT(d, 48), LLAISYS_ACC_AT(d, 52)
#define LLAISYS_ACC_64(d) LLAISYS_ACC_56(d), LLAISYS_ACC_AT(d, 56), LLAISYS_ACC_AT(d, 60)
#define LLAISYS_ACC_72(d) LLAISYS_ACC_64(d), LLAISYS_ACC_AT(d, 64), LLAISYS_ACC_AT(d, 68)
#define LLAISYS_ACC_80(d) LLAISYS_ACC_72(d), LLAISYS_ACC_AT(d, 72), LLAISYS_ACC_AT(d, 76)
#define LLAISYS_ACC_88(d) LLAISYS_ACC_80(d), LLAISYS_ACC_AT(d, 80), LLAISYS_ACC_AT(d, 84)
#define LLAISYS_ACC_96(d) LLAISYS_ACC_88(d), LLAISYS_ACC_AT(d, 88), LLAISYS_ACC_AT(d, 92)

template <typename T> struct Wgmma;

// K-major form for N accumulators per thread: acc[64, 2 N] (+)= a[64, 16] * b[2 N, 16]^T.
#define LLAISYS_WGMMA_K_MAJOR(N, COLUMNS, A, B, ACCUMULATES, NAME)                                 \
    static __device__ __forceinline__ void k_major(float (&d)[N], uint64_t a, uint64_t b,          \
                                                   int accumulates) {                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATES ", 0;\n"                      \
                     "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." NAME "." NAME          \
                     " {" LLAISYS_REGS_##N "}, " A ", " B ", p, 1, 1, 0, 0;\n}"                    \
                     : LLAISYS_ACC_##N(d)                                                          \
                     : "l"(a), "l"(b), "r"(accumulates));                                          \
    }

// k_major:   acc[64, N] (+)= a[64, 16] * b[N, 16]^T, N 8 to 192, both operands in shared memory,
// K-major
// mn_major:  acc[64, N] += a[64, 16] * b[16, N], a in registers (mma.m16n8k16 layout), b MN-major
#define LLAISYS_WGMMA(Type, NAME)                                                                  \
    template <> struct Wgmma<Type> {                                                               \
        LLAISYS_WGMMA_K_MAJOR(4, "8", "%4", "%5", "%6", NAME)                                      \
        LLAISYS_WGMMA_K_MAJOR(8, "16", "%8", "%9", "%10", NAME)                                    \
        LLAISYS_WGMMA_K_MAJOR(16, "32", "%16", "%17", "%18", NAME)                                 \
        LLAISYS_WGMMA_K_MAJOR(24, "48", "%24", "%25", "%26", NAME)                                 \
        LLAISYS_WGMMA_K_MAJOR(32, "64", "%32", "%33", "%34", NAME)                                 \
        LLAISYS_WGMMA_K_MAJOR(40, "80", "%40", "%41", "%42", NAME)                                 \
        LLAISYS_WGMMA_K_MAJOR(48, "96", "%48", "%49", "%50", NAME)                                 \
        LLAISYS_WGMMA_K_MAJOR(56, "112", "%56", "%57", "%58", NAME)                                \
        LLAISYS_WGMMA_K_MAJOR(64, "128", "%64", "%65", "%66", NAME)                                \
        LLAISYS_WGMMA_K_MAJOR(72, "144", "%72", "%73", "%74", NAME)                                \
        LLAISYS_WGMMA_K_MAJOR(80, "160", "%80", "%81", "%82", NAME)                                \
        LLAISYS_WGMMA_K_MAJOR(88, "176", "%88", "%89", "%90", NAME)                                \
        LLAISYS_WGMMA_K_MAJOR(96, "192", "%96", "%97", "%98", NAME)                                \
        static __device__ __forceinline__ void mn_major(float (&d)[64], const uint32_t *a,         \
                                                        uint64_t b) {                              \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                              \
                         "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME              \
                         " {" LLAISYS_REGS_64 "}, {%64,%65,%66,%67}, %68, p, 1, 1, 1;\n}"          \
                         : LLAISYS_ACC_64(d)                                                       \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));            \
        }                                                                                          \
        static __device__ __forceinline__ void mn_major(float (&d)[32], const uint32_t *a,         \
                                                        uint64_t b) {                              \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                              \
                         "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME               \
                         " {" LLAISYS_REGS_32 "}, {%32,%33,%34,%35}, %36, p, 1, 1, 1;\n}"          \
                         : LLAISYS_ACC_32(d)                                                       \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));            \
        }                                                                                          \
    };

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
LLAISYS_WGMMA(bf16, "bf16")
LLAISYS_WGMMA(f16, "f16")
#endif

// acc[64, N] (+)= a[64, 32] * b[N, 32]^T, N 8 to 96, e4m3, K-major: tiles of 128 columns of bytes.
// a is in shared memory, or in registers (mma.m16n8k32 layout).
#define LLAISYS_WGMMA_E4M3(N, COLUMNS, A, B, ACCUMULATES, A0, A1, A2, A3, B4, ACCUMULATES4)        \
    static __device__ __forceinline__ void k_major(float (&d)[N], uint64_t a, uint64_t b,          \
                                                   int accumulates) {                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATES ", 0;\n"                      \
                     "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k32.f32.e4m3.e4m3"               \
                     " {" LLAISYS_REGS_##N "}, " A ", " B ", p, 1, 1;\n}"                          \
                     : LLAISYS_ACC_##N(d)                                                          \
                     : "l"(a), "l"(b), "r"(accumulates));                                          \
    }                                                                                              \
    static __device__ __forceinline__ void k_major(float (&d)[N], const uint32_t (&a)[4],          \
                                                   uint64_t b, int accumulates) {                  \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATES4 ", 0;\n"                     \
                     "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k32.f32.e4m3.e4m3"               \
                     " {" LLAISYS_REGS_##N "}, {" A0 "," A1 "," A2 "," A3 "}, " B4 ", p, 1, 1;\n}" \
                     : LLAISYS_ACC_##N(d)                                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulates));      \
    }

struct WgmmaE4m3 { // to be called by code for 90a only
    LLAISYS_WGMMA_E4M3(4, "8", "%4", "%5", "%6", "%4", "%5", "%6", "%7", "%8", "%9")
    LLAISYS_WGMMA_E4M3(8, "16", "%8", "%9", "%10", "%8", "%9", "%10", "%11", "%12", "%13")
    LLAISYS_WGMMA_E4M3(16, "32", "%16", "%17", "%18", "%16", "%17", "%18", "%19", "%20", "%21")
    LLAISYS_WGMMA_E4M3(32, "64", "%32", "%33", "%34", "%32", "%33", "%34", "%35", "%36", "%37")
    LLAISYS_WGMMA_E4M3(48, "96", "%48", "%49", "%50", "%48", "%49", "%50", "%51", "%52", "%53")
};

#undef LLAISYS_WGMMA_E4M3
#undef LLAISYS_WGMMA
#undef LLAISYS_WGMMA_K_MAJOR
#undef LLAISYS_REGS_4
#undef LLAISYS_REGS_8
#undef LLAISYS_REGS_16
#undef LLAISYS_REGS_24
#undef LLAISYS_REGS_32
#undef LLAISYS_REGS_40
#undef LLAISYS_REGS_48
#undef LLAISYS_REGS_56
#undef LLAISYS_REGS_64
#undef LLAISYS_REGS_72
#undef LLAISYS_REGS_80
#undef LLAISYS_REGS_88
#undef LLAISYS_REGS_96
#undef LLAISYS_ACC_AT
#undef LLAISYS_ACC_4
#undef LLAISYS_ACC_8
#undef LLAISYS_ACC_16
#undef LLAISYS_ACC_24
#undef LLAISYS_ACC_32
#undef LLAISYS_ACC_40
#undef LLAISYS_ACC_48
#undef LLAISYS_ACC_56
#undef LLAISYS_ACC_64
#undef LLAISYS_ACC_72
#undef LLAISYS_ACC_80
#undef LLAISYS_ACC_88
#undef LLAISYS_ACC_96

} // namespace llaisys::ops::cuda
