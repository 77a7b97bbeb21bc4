// wgmma on bf16 with the weights in registers (mma.m16n8k16 layout) and x in shared memory, K-major:
// acc[64, 2 N] += a[64, 16] * b[2 N, 16]^T, N accumulators per thread. See wgmma.cuh.
#pragma once

#include "ops/cuda/wgmma.cuh"

namespace llaisys::ops::cuda {

#define LLAISYS_RS_ACC_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LLAISYS_RS_ACC_8(d, i) LLAISYS_RS_ACC_4(d, i), LLAISYS_RS_ACC_4(d, i + 4)
#define LLAISYS_RS_ACC_16(d, i) LLAISYS_RS_ACC_8(d, i), LLAISYS_RS_ACC_8(d, i + 8)
#define LLAISYS_RS_REGS_4 "%0,%1,%2,%3"
#define LLAISYS_RS_REGS_8 LLAISYS_RS_REGS_4 ",%4,%5,%6,%7"
#define LLAISYS_RS_REGS_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define LLAISYS_RS_REGS_32                                                                         \
    LLAISYS_RS_REGS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LLAISYS_RS_REGS_48                                                                         \
    LLAISYS_RS_REGS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define LLAISYS_RS_REGS_64                                                                         \
    LLAISYS_RS_REGS_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define LLAISYS_RS_REGS_80                                                                         \
    LLAISYS_RS_REGS_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define LLAISYS_RS_REGS_96                                                                         \
    LLAISYS_RS_REGS_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define LLAISYS_RS_REGS_112                                                                        \
    LLAISYS_RS_REGS_96                                                                             \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define LLAISYS_RS_REGS_128                                                                        \
    LLAISYS_RS_REGS_112                                                                            \
    ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// One overload: N accumulators, operands %N to %N + 5.
#define LLAISYS_WGMMA_RS(N, COLUMNS, A, B, ONE, ...)                                               \
    static __device__ __forceinline__ void k_major(float (&d)[N], const uint32_t (&a)[4],          \
                                                   uint64_t b) {                                   \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ONE ", 0;\n"                              \
                     "wgmma.mma_async.sync.aligned.m64n" COLUMNS                                   \
                     "k16.f32.bf16.bf16 {" LLAISYS_RS_REGS_##N "}, {" A "}, " B ", p, 1, 1, 0;\n}" \
                     : __VA_ARGS__                                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));                \
    }

struct WgmmaRs { // to be called by code for 90a only
    LLAISYS_WGMMA_RS(4, "8", "%4,%5,%6,%7", "%8", "%9", LLAISYS_RS_ACC_4(d, 0))
    LLAISYS_WGMMA_RS(8, "16", "%8,%9,%10,%11", "%12", "%13", LLAISYS_RS_ACC_8(d, 0))
    LLAISYS_WGMMA_RS(16, "32", "%16,%17,%18,%19", "%20", "%21", LLAISYS_RS_ACC_16(d, 0))
    LLAISYS_WGMMA_RS(32, "64", "%32,%33,%34,%35", "%36", "%37", LLAISYS_RS_ACC_16(d, 0),
                     LLAISYS_RS_ACC_16(d, 16))
    LLAISYS_WGMMA_RS(48, "96", "%48,%49,%50,%51", "%52", "%53", LLAISYS_RS_ACC_16(d, 0),
                     LLAISYS_RS_ACC_16(d, 16), LLAISYS_RS_ACC_16(d, 32))
    LLAISYS_WGMMA_RS(64, "128", "%64,%65,%66,%67", "%68", "%69", LLAISYS_RS_ACC_16(d, 0),
                     LLAISYS_RS_ACC_16(d, 16), LLAISYS_RS_ACC_16(d, 32), LLAISYS_RS_ACC_16(d, 48))
    LLAISYS_WGMMA_RS(96, "192", "%96,%97,%98,%99", "%100", "%101", LLAISYS_RS_ACC_16(d, 0),
                     LLAISYS_RS_ACC_16(d, 16), LLAISYS_RS_ACC_16(d, 32), LLAISYS_RS_ACC_16(d, 48),
                     LLAISYS_RS_ACC_16(d, 64), LLAISYS_RS_ACC_16(d, 80))
    LLAISYS_WGMMA_RS(128, "256", "%128,%129,%130,%131", "%132", "%133", LLAISYS_RS_ACC_16(d, 0),
                     LLAISYS_RS_ACC_16(d, 16), LLAISYS_RS_ACC_16(d, 32), LLAISYS_RS_ACC_16(d, 48),
                     LLAISYS_RS_ACC_16(d, 64), LLAISYS_RS_ACC_16(d, 80), LLAISYS_RS_ACC_16(d, 96),
                     LLAISYS_RS_ACC_16(d, 112))
};

#undef LLAISYS_WGMMA_RS
#undef LLAISYS_RS_REGS_4
#undef LLAISYS_RS_REGS_8
#undef LLAISYS_RS_REGS_16
#undef LLAISYS_RS_REGS_32
#undef LLAISYS_RS_REGS_48
#undef LLAISYS_RS_REGS_64
#undef LLAISYS_RS_REGS_80
#undef LLAISYS_RS_REGS_96
#undef LLAISYS_RS_REGS_112
#undef LLAISYS_RS_REGS_128
#undef LLAISYS_RS_ACC_4
#undef LLAISYS_RS_ACC_8
#undef LLAISYS_RS_ACC_16

} // namespace llaisys::ops::cuda
