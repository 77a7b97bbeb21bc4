// Barriers in shared memory and bulk copies that end on them: compute capability 9 and above. On
// older devices a kernel that uses them must not be launched; there they are compiled to nothing.
//
// A barrier is in phase 0 at first. It goes on to the next phase when as many arrivals as it was made
// for, and all bytes that were announced, have come; barrier_wait(b, p) returns when the phase with
// parity p is over, so that the n-th use of a slot (from 0) waits for n % 2.
#pragma once

#include "ops/cuda/common.cuh"

namespace llaisys::ops::cuda {

// Whether the device has these copies, and shared memory for the rings that they fill.
constexpr int kLeastRingShared = 200 << 10;
inline bool has_bulk_copies(const device::CudaStream &stream) {
    return stream.has_early_launch && stream.max_shared_bytes >= kLeastRingShared;
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
#endif
}
// By the thread that made them, before the block meets: the copy engine sees the barriers too.
__device__ __forceinline__ void barriers_are_made() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
// Arrives and announces bytes that copies will bring.
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
#endif
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    uint32_t is_over = 0;
    do {
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}"
                     : "=r"(is_over)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (is_over == 0);
#endif
}

// One thread of the warp.
__device__ __forceinline__ bool is_elected() {
    uint32_t is = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(is));
#endif
    return is != 0;
}

// For copies of what is read once: the second-level cache lets go of it first.
__device__ __forceinline__ uint64_t read_once() {
    uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}
// And for what other blocks will read as well.
__device__ __forceinline__ uint64_t read_often() {
    uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}

// bytes: a multiple of 16; both addresses lie on 16 bytes.
__device__ __forceinline__ void copy_bulk(uint32_t shared, const void *global, uint32_t bytes,
                                          uint32_t barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
#endif
}

// Meets so many threads of the block, whole warps, at barrier Id (0 is __syncthreads()'s).
template <int Id, int Threads> __device__ __forceinline__ void meet() {
    asm volatile("bar.sync %0, %1;" ::"n"(Id), "n"(Threads) : "memory");
}
// The same of several teams of so many threads each; barriers from 2 on.
__device__ __forceinline__ void meet_team(int team, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + team), "r"(threads) : "memory");
}

} // namespace llaisys::ops::cuda
