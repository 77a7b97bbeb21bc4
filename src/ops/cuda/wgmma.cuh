// wgmma: asynchronous warpgroup MMA (four warps, 64 rows) of compute capability 9.0. Needs the
// architecture 90a: kernels that use it have no body on other architectures.
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
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// wgmma.wait_group: waits until at most `Pending` groups are in flight.
template <int Pending> __device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
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
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// setmaxnreg: registers per thread from here on; every warp of the warpgroup.
template <int Count> __device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count> __device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
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

// N accumulators per thread, acc[64, 2 N] (+)= a * b. FORM: k and types of the instruction; TAIL:
// its last operands. I0 to I5: numbers of the inputs, which follow the accumulators.
//   SS   both operands in shared memory
//   RS   a in registers (mma.m16n8k16 layout; e4m3: mma.m16n8k32)
#define LLAISYS_WGMMA_SS(N, COLUMNS, FORM, TAIL, I0, I1, I2)                                       \
    static __device__ __forceinline__ void k_major(float (&d)[N], uint64_t a, uint64_t b,          \
                                                   int accumulates) {                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " I2 ", 0;\n"                               \
                     "wgmma.mma_async.sync.aligned.m64n" COLUMNS FORM " {" LLAISYS_REGS_##N        \
                     "}, " I0 ", " I1 ", p, 1, 1" TAIL ";\n}"                                      \
                     : LLAISYS_ACC_##N(d)                                                          \
                     : "l"(a), "l"(b), "r"(accumulates));                                          \
    }
#define LLAISYS_WGMMA_RS(METHOD, N, COLUMNS, FORM, TAIL, I0, I1, I2, I3, I4, I5)                   \
    static __device__ __forceinline__ void METHOD(float (&d)[N], const uint32_t *a, uint64_t b,    \
                                                  int accumulates) {                               \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " I5 ", 0;\n"                               \
                     "wgmma.mma_async.sync.aligned.m64n" COLUMNS FORM " {" LLAISYS_REGS_##N        \
                     "}, {" I0 "," I1 "," I2 "," I3 "}, " I4 ", p, 1, 1" TAIL ";\n}"               \
                     : LLAISYS_ACC_##N(d)                                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulates));      \
    }
#define LLAISYS_WGMMA_K_MAJOR(N, COLUMNS, FORM, SS_TAIL, RS_TAIL, I0, I1, I2, I3, I4, I5)          \
    LLAISYS_WGMMA_SS(N, COLUMNS, FORM, SS_TAIL, I0, I1, I2)                                        \
    LLAISYS_WGMMA_RS(k_major, N, COLUMNS, FORM, RS_TAIL, I0, I1, I2, I3, I4, I5)
// The numbers of columns that 16-bit operands and e4m3 have in common.
#define LLAISYS_WGMMA_K_MAJOR_96(FORM, SS, RS)                                                     \
    LLAISYS_WGMMA_K_MAJOR(4, "8", FORM, SS, RS, "%4", "%5", "%6", "%7", "%8", "%9")                \
    LLAISYS_WGMMA_K_MAJOR(8, "16", FORM, SS, RS, "%8", "%9", "%10", "%11", "%12", "%13")           \
    LLAISYS_WGMMA_K_MAJOR(16, "32", FORM, SS, RS, "%16", "%17", "%18", "%19", "%20", "%21")        \
    LLAISYS_WGMMA_K_MAJOR(32, "64", FORM, SS, RS, "%32", "%33", "%34", "%35", "%36", "%37")        \
    LLAISYS_WGMMA_K_MAJOR(48, "96", FORM, SS, RS, "%48", "%49", "%50", "%51", "%52", "%53")

// k_major:   acc[64, 2 N] (+)= a[64, 16] * b[2 N, 16]^T, K-major
// mn_major:  acc[64, 2 N] (+)= a[64, 16] * b[16, 2 N], a in registers, b MN-major
#define LLAISYS_WGMMA(Type, FORM)                                                                  \
    template <> struct Wgmma<Type> {                                                               \
        LLAISYS_WGMMA_K_MAJOR_96(FORM, ", 0, 0", ", 0")                                            \
        LLAISYS_WGMMA_K_MAJOR(64, "128", FORM, ", 0, 0", ", 0", "%64", "%65", "%66", "%67", "%68", \
                              "%69")                                                               \
        LLAISYS_WGMMA_SS(40, "80", FORM, ", 0, 0", "%40", "%41", "%42")                            \
        LLAISYS_WGMMA_SS(56, "112", FORM, ", 0, 0", "%56", "%57", "%58")                           \
        LLAISYS_WGMMA_SS(72, "144", FORM, ", 0, 0", "%72", "%73", "%74")                           \
        LLAISYS_WGMMA_SS(88, "176", FORM, ", 0, 0", "%88", "%89", "%90")                           \
        LLAISYS_WGMMA_SS(96, "192", FORM, ", 0, 0", "%96", "%97", "%98")                           \
        LLAISYS_WGMMA_RS(mn_major, 32, "64", FORM, ", 1", "%32", "%33", "%34", "%35", "%36",       \
                         "%37")                                                                    \
        LLAISYS_WGMMA_RS(mn_major, 64, "128", FORM, ", 1", "%64", "%65", "%66", "%67", "%68",      \
                         "%69")                                                                    \
    };

template <typename T> struct Wgmma;
LLAISYS_WGMMA(bf16, "k16.f32.bf16.bf16")
LLAISYS_WGMMA(f16, "k16.f32.f16.f16")

// acc[64, 2 N] (+)= a[64, 32] * b[2 N, 32]^T, e4m3, K-major: tiles of 128 columns of bytes.
struct WgmmaE4m3 {
    LLAISYS_WGMMA_K_MAJOR_96("k32.f32.e4m3.e4m3", "", "")
};

} // namespace llaisys::ops::cuda
