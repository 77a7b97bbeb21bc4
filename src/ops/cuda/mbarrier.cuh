// mbarrier, cp.async.bulk and named barriers: compute capability 9 and above. Kernels that use them
// have no body on older architectures.
//
// An mbarrier starts in phase 0. A phase completes after the expected number of arrivals and
// after all expected transaction bytes have arrived. mbarrier_wait_parity(b, p) returns when the
// phase with parity p has completed: round n (from 0) of a pipeline stage waits for parity n % 2.
#pragma once

#include "ops/cuda/common.cuh"

namespace llaisys::ops::cuda {

// Whether the device has bulk copies and enough shared memory for the pipelines that they fill.
constexpr int kMinPipelineSmem = 200 << 10;
inline bool has_bulk_copy(const device::CudaStream &stream) {
    return stream.has_pdl && stream.max_shared_bytes >= kMinPipelineSmem;
}

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}
// fence.mbarrier_init + fence.proxy.async, by the initializing thread before the block
// synchronizes: makes the barriers visible to the async proxy.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Full and empty mbarriers of n pipeline stages, with the arrivals that complete a phase; by one
// thread, before fence_mbarrier_init().
__device__ __forceinline__ void init_stages(uint32_t full, uint32_t empty, int n,
                                            uint32_t full_arrivals, uint32_t empty_arrivals) {
    for (int stage = 0; stage < n; ++stage) {
        mbarrier_init(full + uint32_t(stage) * 8, full_arrivals);
        mbarrier_init(empty + uint32_t(stage) * 8, empty_arrivals);
    }
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives and adds `bytes` to the expected transaction count.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void mbarrier_wait_parity(uint32_t barrier, uint32_t parity) {
    uint32_t is_complete = 0;
    do {
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}"
                     : "=r"(is_complete)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (is_complete == 0);
}

// elect.sync: true in one thread of the warp.
__device__ __forceinline__ bool elect_sync() {
    uint32_t is = 0;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(is));
    return is != 0;
}

// L2 cache policy for data that is read once.
__device__ __forceinline__ uint64_t l2_evict_first_policy() {
    uint64_t policy = 0;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// L2 cache policy for data that other blocks read again.
__device__ __forceinline__ uint64_t l2_evict_last_policy() {
    uint64_t policy = 0;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// cp.async.bulk global -> shared. bytes: a multiple of 16; both addresses 16-byte aligned.
__device__ __forceinline__ void cp_async_bulk(uint32_t shared, const void *global, uint32_t bytes,
                                              uint32_t barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}

// bar.sync: synchronizes `Threads` threads (whole warps) at named barrier Id. Id 0 is
// __syncthreads().
template <int Id, int Threads> __device__ __forceinline__ void named_barrier_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(Id), "n"(Threads) : "memory");
}
// bar.sync of one of several groups of `threads` threads; group g uses named barrier 2 + g.
__device__ __forceinline__ void named_barrier_sync_group(int group, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + group), "r"(threads) : "memory");
}

} // namespace llaisys::ops::cuda
