// What the rings of boxes share (box_ring.cuh, wide_ring.cuh): how a warp fills the slots, and what a warpgroup
// makes of a chunk in one.
#pragma once

#include "ops/cuda/bulk.cuh"
#include "ops/cuda/wgmma.cuh"

namespace llaisys::ops::cuda {

// Where a ring's slots lie and their barriers do: addresses in shared memory, 8 bytes a barrier.
struct BoxSlots {
    int n;
    uint32_t bytes; // from slot to slot
    uint32_t full, empty;
};

// By one warp: the chunks [first, first + count), `step` of them a slot, one slot after the other to the same
// place `to` of each. copy(to, chunk, barrier) queues the copy of `bytes`; `early` slots are filled before the
// input is there. The loop is the same for all lanes, or the compiler would move addresses about.
template <typename Copy>
__device__ __forceinline__ void fill_slots(const BoxSlots &slots, int first, int count, int step,
                                           uint32_t to, uint32_t bytes, int early,
                                           const Copy &copy) {
    int slot = 0;
    uint32_t round = 0;
    for (int chunk = 0; chunk < count; chunk += step) {
        if (early-- == 0) {
            wait_for_input();
        }
        if (round > 0) {
            barrier_wait(slots.empty + uint32_t(slot) * 8, (round - 1) & 1);
        }
        if (is_elected()) {
            const uint32_t full = slots.full + uint32_t(slot) * 8;
            barrier_arrive_expecting(full, bytes);
            copy(to + uint32_t(slot) * slots.bytes, first + chunk, full);
        }
        __syncwarp();
        if (++slot == slots.n) {
            slot = 0;
            ++round;
        }
    }
}

// By a warpgroup: sums += w * x^T of a chunk of 64 values of k, whose boxes begin at these addresses. When it
// returns, the products before these are done.
template <typename T, int N>
__device__ __forceinline__ void multiply_chunk(float (&sums)[N], uint32_t w_at, uint32_t x_at) {
    const uint64_t x = descriptor_along(x_at);
    const uint64_t w = descriptor_along(w_at);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; ++k) { // 32 bytes further each
        Wgmma<T>::along(sums, w + uint64_t(k * 2), x + uint64_t(k * 2), 1);
    }
    products_end_group();
    products_wait<1>();
}

} // namespace llaisys::ops::cuda
