// Blocks of a cluster and each other's shared memory: compute capability 9 and above, on older devices
// compiled to nothing.
//
// An address of another block's shared memory is the own one of the same place, mapped to its rank. Values
// are stored there without waiting; the barrier that goes with them lies in the same block and counts their
// bytes, so the receiver announces them (barrier_arrive_expecting) and waits with barrier_wait_cluster.
// Bytes may come before they are announced, but not before the barrier was made: the cluster meets once
// after that. A block must not end while others may still store to it.
#pragma once

#include "ops/cuda/bulk.cuh"

namespace llaisys::ops::cuda {

__device__ __forceinline__ uint32_t address_in_block(uint32_t shared, uint32_t rank) {
    uint32_t mapped = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(shared), "r"(rank));
#endif
    return mapped;
}
__device__ __forceinline__ uint32_t rank_in_cluster() {
    uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
// At a barrier of another block; its address is mapped. Orders nothing but what has ended before (products that were
// waited for): with a release it would wait for all of this thread's memory.
__device__ __forceinline__ void arrive_in_block(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
                 : "memory");
#endif
}
// Both addresses are mapped.
__device__ __forceinline__ void store_in_block(uint32_t address, float value, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
            address),
        "f"(value), "r"(barrier)
        : "memory");
#endif
}
__device__ __forceinline__ void store_in_block(uint32_t address, float2 value, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
            "r"(address),
        "f"(value.x), "f"(value.y), "r"(barrier)
        : "memory");
#endif
}
__device__ __forceinline__ void store_in_block(uint32_t address, const float4 &value,
                                               uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
                 "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
                 : "memory");
#endif
}
// As barrier_wait, for what other blocks stored.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    uint32_t is_over = 0;
    do {
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}"
                     : "=r"(is_over)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (is_over == 0);
#endif
}
// All threads of all blocks of the cluster, each of them first the one, then the other.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
// The same where the others need to see nothing but barriers (barriers_are_made): without a fence that waits for
// all of this thread's memory.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

} // namespace llaisys::ops::cuda
