// Thread block clusters and distributed shared memory (DSMEM): compute capability 9 and above.
// Kernels that use them have no body on older architectures.
//
// mapa() maps an address of this block's shared memory to the same offset in another block of the
// cluster. st_async() stores there without waiting and completes on an mbarrier of the
// destination block, which expects the bytes (mbarrier_arrive_expect_tx) and waits with
// mbarrier_wait_parity_cluster. Bytes may arrive before they are expected, but not before the
// barrier is initialized: the cluster synchronizes once after initialization. A block must not
// exit while others may still store to its shared memory.
#pragma once

#include "ops/cuda/mbarrier.cuh"

namespace llaisys::ops::cuda {

__device__ __forceinline__ uint32_t mapa(uint32_t shared, uint32_t rank) {
    uint32_t mapped = 0;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared), "r"(rank));
    return mapped;
}
__device__ __forceinline__ uint32_t cluster_ctarank() {
    uint32_t rank = 0;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Arrives at an mbarrier of another block; `barrier` is a mapped address. Relaxed: orders only
// work that has already completed (wgmma waited for). A release would wait for all memory
// operations of the thread.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier) {
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
                 : "memory");
}
// Store to shared memory of a block of the cluster; `address` is mapped. Visible there after
// barrier_cluster_arrive() and barrier_cluster_wait().
__device__ __forceinline__ void st_shared_cluster(uint32_t address, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
// st.async; both addresses are mapped.
__device__ __forceinline__ void st_async(uint32_t address, float value, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
            address),
        "f"(value), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void st_async(uint32_t address, float2 value, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
            "r"(address),
        "f"(value.x), "f"(value.y), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void st_async(uint32_t address, const float4 &value, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
                 : "memory");
}
// mbarrier_wait_parity with acquire at cluster scope, for stores of other blocks.
__device__ __forceinline__ void mbarrier_wait_parity_cluster(uint32_t barrier, uint32_t parity) {
    uint32_t is_complete = 0;
    do {
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}"
                     : "=r"(is_complete)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (is_complete == 0);
}
// barrier.cluster: every thread of every block of the cluster calls arrive, then wait.
__device__ __forceinline__ void barrier_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
// Relaxed arrive: publishes only initialized mbarriers (fence_mbarrier_init), without the fence
// that waits for all memory operations of the thread.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

} // namespace llaisys::ops::cuda
