// Products of up to 96 rows of x with 16-bit values, out[m, n] = x[m, k] * w[n, k]^T, on compute capability
// 9.0: bound by reading the weights once. What becomes of the sums is up to `Use` (few_rows_types.cuh, units
// of 8 items).
//
// out^T = w * x^T: an atom is the 8 + 8 weight rows of a unit, four of them the 64-row operand of wgmma; the
// rows of x (32, 64 or 96, zeros where there are fewer) are its columns. A block has up to 20 atoms and goes
// through k once, so that x comes with as many weights as can be: a slot of the ring holds 64 values of k of
// all of them. One warp copies weights, one x, and each warpgroup computes four atoms. Where there are too
// few atoms for all processors, a cluster of blocks shares them by parts of k; sums then go to the blocks of
// the cluster through distributed shared memory, each of which adds up some, in the order of the parts.
//
// Weights are on their way before the kernel waits for its input. A row's bits depend on n, k and how the product
// is cut, not on the rows beside it.
#pragma once

#include "ops/cuda/box_slots.cuh"
#include "ops/cuda/cluster.cuh"
#include "ops/cuda/wide_ring_shape.cuh"

namespace llaisys::ops::cuda {

struct WideMaps {
    CUtensorMap w, x;
};

template <typename T, int Columns, typename Use>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_ring_kernel(const __grid_constant__ WideMaps maps, WideShape shape, int m, Use use) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int kPieces = Columns / 8; // of an atom
    const uint32_t full = shared_address(shared);
    const uint32_t empty = full + kWideMostSlots * 8;
    const uint32_t exchange = empty + kWideMostSlots * 8;
    const uint32_t ring = full + kWideBarrierBytes;
    const int warp = __shfl_sync(kAll, threadIdx.x / kWarp, 0); // known to be one for the warp
    const int lane = threadIdx.x % kWarp;
    const int n_groups = (shape.atoms + 3) / 4;
    const int rank = int(blockIdx.x) % shape.cluster;
    const int first_atom = int(blockIdx.x) / shape.cluster * shape.atoms;
    const int first_chunk = rank * shape.chunks;
    const int own_chunks = max(0, min(shape.chunks, shape.all_chunks - first_chunk));
    const int n_pieces = shape.atoms * kPieces;
    const int own_pieces = (n_pieces - rank + shape.cluster - 1) / shape.cluster;
    const int most_pieces = (n_pieces + shape.cluster - 1) / shape.cluster; // of a block

    allow_next();
    if (threadIdx.x == n_groups * 128) {
        for (int slot = 0; slot < shape.n_slots; ++slot) {
            barrier_init(full + uint32_t(slot) * 8, 2);
            barrier_init(empty + uint32_t(slot) * 8, uint32_t(n_groups));
        }
        barrier_init(exchange, 1);
        barriers_are_made();
        barrier_arrive_expecting(exchange, uint32_t(shape.cluster * own_pieces) * kWidePieceBytes);
    }
    __syncthreads();
    if (shape.cluster > 1) {
        cluster_arrive_relaxed();
    }
    const BoxSlots slots{shape.n_slots, shape.slot_bytes, full, empty};
    if (warp == n_groups * 4) {
        const uint64_t policy = read_once();
        const int first_head = first_atom / shape.a_head;
        const int first_in_head = first_atom - first_head * shape.a_head;
        fill_slots(slots, first_chunk, own_chunks, 1, ring, shape.x_at, shape.early_slots,
                   [&](uint32_t to, int chunk, uint32_t barrier) {
                       int head = first_head, in_head = first_in_head;
                       for (int atom = 0; atom < shape.atoms; atom += shape.box) {
                           copy_box(to + uint32_t(atom) * kWideAtomBytes, &maps.w,
                                    chunk * kBoxColumns, 0, 0, in_head, head, barrier, policy);
                           in_head += shape.box;
                           head += in_head == shape.a_head ? 1 : 0;
                           in_head = in_head == shape.a_head ? 0 : in_head;
                       }
                   });
    } else if (warp == n_groups * 4 + 1) {
        const uint64_t policy = read_often();
        fill_slots(slots, first_chunk, own_chunks, 1, ring + shape.x_at,
                   shape.slot_bytes - shape.x_at, 0, [&](uint32_t to, int chunk, uint32_t barrier) {
                       copy_box(to, &maps.x, chunk * kBoxColumns, 0, barrier, policy);
                   });
    }
    wait_for_input();
    if (warp < n_groups * 4) {
        float sums[Columns / 2] = {};
        const int group = warp / 4;
        int slot = 0;
        int before = -1; // slot that is read when the products before these are
        uint32_t parity = 0;
        for (int chunk = 0; chunk < own_chunks; ++chunk) {
            barrier_wait(full + uint32_t(slot) * 8, parity);
            const uint32_t at = ring + uint32_t(slot) * shape.slot_bytes;
            multiply_chunk<T>(sums, at + uint32_t(group * 4) * kWideAtomBytes, at + shape.x_at);
            if (before >= 0 && threadIdx.x % 128 == 0) {
                barrier_arrive(empty + uint32_t(before) * 8);
            }
            before = slot;
            const bool is_last = ++slot == shape.n_slots;
            slot = is_last ? 0 : slot;
            parity ^= is_last ? 1 : 0;
        }
        products_wait<0>();
        settle(sums);
        if (shape.cluster == 1) {
            const int atom = first_atom + warp;
#pragma unroll
            for (int j = 0; j < Columns / 8; ++j) {
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int row = 8 * j + lane % 4 * 2 + c;
                    if (warp < shape.atoms && atom < shape.n_atoms && row < m) {
                        const auto held = hold(use, atom, lane / 4, row);
                        use.store(atom, lane / 4, row, sums[4 * j + c], sums[4 * j + 2 + c],
                                  use.ready(atom, lane / 4, held));
                    }
                }
            }
            return;
        }
        cluster_wait(); // the others run and have made their barriers
        if (warp < shape.atoms) {
#pragma unroll
            for (int j = 0; j < Columns / 8; ++j) {
                const int piece = warp * kPieces + j;
                const auto block = uint32_t(piece % shape.cluster);
                const int place = rank * most_pieces + piece / shape.cluster;
                store_in_block(
                    address_in_block(full + shape.sums_at + uint32_t(place) * kWidePieceBytes +
                                         uint32_t(lane) * 16,
                                     block),
                    make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]),
                    address_in_block(exchange, block));
            }
        }
    } else if (shape.cluster > 1) {
        cluster_wait();
    } else {
        return;
    }
    // Piece i of this block's: an atom, rows 8 j + lane % 4 * 2 and the next of x.
    const auto *all = reinterpret_cast<const float4 *>(shared + shape.sums_at);
    const int n_warps = n_groups * 4 + 2;
    bool is_there = false; // the sums
    for (int i = warp; i < own_pieces; i += n_warps) {
        const int piece = i * shape.cluster + rank;
        const int atom = first_atom + piece / kPieces;
        const int row = piece % kPieces * 8 + lane % 4 * 2;
        typename Use::Held held[2] = {};
#pragma unroll
        for (int c = 0; c < 2; ++c) { // on its way while the sums come
            if (atom < shape.n_atoms && row + c < m) {
                held[c] = hold(use, atom, lane / 4, row + c);
            }
        }
        const typename Use::Ready ready[2] = {use.ready(atom, lane / 4, held[0]),
                                              use.ready(atom, lane / 4, held[1])};
        if (!is_there) {
            barrier_wait_cluster(exchange, 0);
            is_there = true;
        }
        float4 total = all[i * kWarp + lane];
        for (int part = 1; part < shape.cluster; ++part) {
            const float4 more = all[(part * most_pieces + i) * kWarp + lane];
            total =
                make_float4(total.x + more.x, total.y + more.y, total.z + more.z, total.w + more.w);
        }
        if (atom < shape.n_atoms && row < m) {
            use.store(atom, lane / 4, row, total.x, total.z, ready[0]);
        }
        if (atom < shape.n_atoms && row + 1 < m) {
            use.store(atom, lane / 4, row + 1, total.y, total.w, ready[1]);
        }
    }
    if (!is_there) {
        barrier_wait_cluster(exchange, 0); // a block must not end while others store to it
    }
#endif
}

// Whether this device and shape have it; cluster 0: it is not asked for.
template <typename T>
bool can_wide_ring(const device::CudaStream &stream, const FewRowsInput &in,
                   const AtomPlaces<T> &places, const WideTuning &tuning) {
    return tuning.cluster > 0 && has_wgmma(stream) && encode_tensor_map() != nullptr && in.m >= 1 &&
           in.m <= kWideRows && in.k > 0 && in.k % 8 == 0 && in.ldx % 8 == 0 &&
           places.is_possible() && stream.n_processors >= 16 &&
           wide_shape(stream, places, in.k, wide_columns(in.m), tuning).fits(stream);
}

template <typename T, int Columns, typename Use>
void launch_wide_ring(const device::CudaStream &stream, const FewRowsInput &in, const Use &use,
                      const WideTuning &tuning) {
    const AtomPlaces<T> places = use.atoms();
    const WideShape shape = wide_shape(stream, places, in.k, Columns, tuning);
    const int64_t heads = (places.count + places.a_head - 1) / places.a_head;
    const WideMaps maps{
        boxes_of<T, 5>(places.data, {in.k, 8, 2, places.a_head, heads},
                       {in.k, places.to_other, places.to_next, places.to_next_head},
                       {8, 2, uint32_t(shape.box), 1}),
        boxes_of<T, 2>(static_cast<const T *>(in.x), {in.k, in.m}, {in.ldx}, {Columns})};
    const int clusters = (shape.n_atoms + shape.atoms - 1) / shape.atoms;
    const int threads = (shape.atoms + 3) / 4 * 128 + 2 * kWarp;
    const auto kernel = wide_ring_kernel<T, Columns, Use>;
    allow_shared(kernel, size_t(stream.max_shared_bytes));
    launch(stream, kernel, unsigned(clusters * shape.cluster), unsigned(threads), shape.bytes,
           {true, unsigned(shape.cluster)}, maps, shape, in.m, use);
}

// in.x is given; in.m at most kWideRows.
template <typename T, typename Use>
void run_wide_ring(const device::CudaStream &stream, const FewRowsInput &in, Use use,
                   const WideTuning &tuning) {
    use.items = 8;
    switch (wide_columns(in.m)) {
    case 32:
        return launch_wide_ring<T, 32>(stream, in, use, tuning);
    case 64:
        return launch_wide_ring<T, 64>(stream, in, use, tuning);
    default:
        return launch_wide_ring<T, 96>(stream, in, use, tuning);
    }
}

} // namespace llaisys::ops::cuda
