// Products of a warpgroup (four warps, 64 rows) on the tensor cores of compute capability 9.0: wgmma,
// which needs the architecture 90a. Compiled for anything else these do nothing and must not be run.
//
// Operands in shared memory are tiles of 64 columns of 16-bit values: rows of 128 bytes, 8 rows an
// atom of 1,024 bytes on a multiple of 1,024, the 16-byte chunk c of row r at chunk c ^ (r % 8) (the
// swizzle over 128 bytes). The same tile serves in two ways:
//
//   k runs along a row      descriptor_along(tile + 2 * k bytes): atoms of 8 rows 1,024 bytes apart
//   k runs down the rows    descriptor_down(tile + 128 * k bytes, step): likewise; the next 64 columns
//                           are `step` bytes further
//
// Sums lie as in mma.m16n8k16: lane l of warp w has rows 16 w + l / 4 (sums[4 j], sums[4 j + 1]) and 8
// more (sums[4 j + 2], sums[4 j + 3]), columns 8 j + l % 4 * 2 and the next.
#pragma once

#include "ops/cuda/common.cuh"

namespace llaisys::ops::cuda {

// Whether this build and device have them.
inline bool has_wgmma(const device::CudaStream &stream) {
#if defined(LLAISYS_HAVE_SM90A)
    return stream.device_major == 9 && stream.compute_major == 9;
#else
    (void)stream;
    return false;
#endif
}

// Byte offset of 16-byte chunk `chunk` (0 to 7) of row `row` in a tile of 64 columns.
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
    return uint32_t(row * 128 + ((chunk ^ (row & 7)) << 4));
}

__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint32_t leading,
                                               uint32_t stride) {
    constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t((leading & 0x3ffff) >> 4) << 16 |
           uint64_t((stride & 0x3ffff) >> 4) << 32 | kSwizzle128;
}
__device__ __forceinline__ uint64_t descriptor_along(uint32_t address) {
    return descriptor(address, 16, 1024); // the first distance is not looked at
}
__device__ __forceinline__ uint64_t descriptor_down(uint32_t address, uint32_t step) {
    return descriptor(address, step, 1024);
}

// Before the first product after its registers were written, all four warps.
__device__ __forceinline__ void products_begin() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void products_end_group() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until at most so many groups are under way.
template <int Pending> __device__ __forceinline__ void products_wait() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#endif
}
// Keeps the compiler from moving what is done with sums to before the wait.
template <int N> __device__ __forceinline__ void settle(float (&sums)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        asm volatile("" : "+f"(sums[i])::"memory");
    }
}
// What this thread wrote to shared memory is seen by the tensor cores, once a barrier was passed.
__device__ __forceinline__ void show_to_products() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Registers of a thread from here on; every warp of a warpgroup.
template <int Count> __device__ __forceinline__ void take_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
#endif
}
template <int Count> __device__ __forceinline__ void give_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
#endif
}

#define LLAISYS_NAMES_4 "%0,%1,%2,%3"
#define LLAISYS_NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define LLAISYS_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define LLAISYS_NAMES_32                                                                           \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                       \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LLAISYS_NAMES_48                                                                           \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                       \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                             \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define LLAISYS_NAMES_64                                                                           \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                       \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                             \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                             \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define LLAISYS_NAMES_96                                                                           \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                       \
    "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"                             \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"                             \
    "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"                             \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"                             \
    "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define LLAISYS_SUMS_AT(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LLAISYS_SUMS_4(d) LLAISYS_SUMS_AT(d, 0)
#define LLAISYS_SUMS_8_AT(d, i) LLAISYS_SUMS_AT(d, i), LLAISYS_SUMS_AT(d, i + 4)
#define LLAISYS_SUMS_16_AT(d, i) LLAISYS_SUMS_8_AT(d, i), LLAISYS_SUMS_8_AT(d, i + 8)
#define LLAISYS_SUMS_32_AT(d, i) LLAISYS_SUMS_16_AT(d, i), LLAISYS_SUMS_16_AT(d, i + 16)
#define LLAISYS_SUMS_64_AT(d, i) LLAISYS_SUMS_32_AT(d, i), LLAISYS_SUMS_32_AT(d, i + 32)
#define LLAISYS_SUMS_8(d) LLAISYS_SUMS_8_AT(d, 0)
#define LLAISYS_SUMS_16(d) LLAISYS_SUMS_16_AT(d, 0)
#define LLAISYS_SUMS_32(d) LLAISYS_SUMS_32_AT(d, 0)
#define LLAISYS_SUMS_48(d) LLAISYS_SUMS_32_AT(d, 0), LLAISYS_SUMS_16_AT(d, 32)
#define LLAISYS_SUMS_64(d) LLAISYS_SUMS_64_AT(d, 0)
#define LLAISYS_SUMS_96(d) LLAISYS_SUMS_64_AT(d, 0), LLAISYS_SUMS_32_AT(d, 64)

template <typename T> struct Wgmma;

// sums[64, 2 N] (+)= a[64, 16] * b[2 N, 16]^T: the form of `along` for N sums a thread.
#define LLAISYS_ALONG(N, COLUMNS, A, B, ADDS, NAME)                                                \
    static __device__ __forceinline__ void along(float (&d)[N], uint64_t a, uint64_t b,            \
                                                 int adds) {                                       \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADDS ", 0;\n"                             \
                     "wgmma.mma_async.sync.aligned.m64n" COLUMNS "k16.f32." NAME "." NAME          \
                     " {" LLAISYS_NAMES_##N "}, " A ", " B ", p, 1, 1, 0, 0;\n}"                   \
                     : LLAISYS_SUMS_##N(d)                                                         \
                     : "l"(a), "l"(b), "r"(adds));                                                 \
    }

// along:  sums[64, N] (+)= a[64, 16] * b[N, 16]^T, N 8 to 192, both in shared memory, k along the rows
// down:   sums[64, N] += a[64, 16] * b[16, N], a in registers (as of mma.m16n8k16), k down the rows
#define LLAISYS_WGMMA(Type, NAME)                                                                  \
    template <> struct Wgmma<Type> {                                                               \
        LLAISYS_ALONG(4, "8", "%4", "%5", "%6", NAME)                                              \
        LLAISYS_ALONG(8, "16", "%8", "%9", "%10", NAME)                                            \
        LLAISYS_ALONG(16, "32", "%16", "%17", "%18", NAME)                                         \
        LLAISYS_ALONG(32, "64", "%32", "%33", "%34", NAME)                                         \
        LLAISYS_ALONG(48, "96", "%48", "%49", "%50", NAME)                                         \
        LLAISYS_ALONG(64, "128", "%64", "%65", "%66", NAME)                                        \
        LLAISYS_ALONG(96, "192", "%96", "%97", "%98", NAME)                                        \
        static __device__ __forceinline__ void down(float (&d)[64], const uint32_t *a,             \
                                                    uint64_t b) {                                  \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"                              \
                         "wgmma.mma_async.sync.aligned.m64n128k16.f32." NAME "." NAME              \
                         " {" LLAISYS_NAMES_64 "}, {%64,%65,%66,%67}, %68, p, 1, 1, 1;\n}"         \
                         : LLAISYS_SUMS_64(d)                                                      \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));            \
        }                                                                                          \
        static __device__ __forceinline__ void down(float (&d)[32], const uint32_t *a,             \
                                                    uint64_t b) {                                  \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                              \
                         "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME               \
                         " {" LLAISYS_NAMES_32 "}, {%32,%33,%34,%35}, %36, p, 1, 1, 1;\n}"         \
                         : LLAISYS_SUMS_32(d)                                                      \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));            \
        }                                                                                          \
    };

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
LLAISYS_WGMMA(bf16, "bf16")
LLAISYS_WGMMA(f16, "f16")
#endif

#undef LLAISYS_WGMMA
#undef LLAISYS_ALONG
#undef LLAISYS_NAMES_4
#undef LLAISYS_NAMES_8
#undef LLAISYS_NAMES_16
#undef LLAISYS_NAMES_32
#undef LLAISYS_NAMES_48
#undef LLAISYS_NAMES_64
#undef LLAISYS_NAMES_96
#undef LLAISYS_SUMS_AT
#undef LLAISYS_SUMS_8_AT
#undef LLAISYS_SUMS_16_AT
#undef LLAISYS_SUMS_32_AT
#undef LLAISYS_SUMS_64_AT
#undef LLAISYS_SUMS_4
#undef LLAISYS_SUMS_8
#undef LLAISYS_SUMS_16
#undef LLAISYS_SUMS_32
#undef LLAISYS_SUMS_48
#undef LLAISYS_SUMS_64
#undef LLAISYS_SUMS_96

} // namespace llaisys::ops::cuda
