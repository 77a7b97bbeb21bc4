// out[m, n] (+)= x[m, k] * w[n, k]^T in f32 for up to 16 rows of x, 16-bit values, on compute capability 9.0:
// bound by reading the weights once, and the rows of x once for every cluster.
//
// out^T = w * x^T: weights are the 64-row operand of wgmma and the rows of x (8 or 16, zeros where there are
// fewer) its columns, both as boxes of 64 values of k in shared memory. A cluster of blocks shares up to 128
// rows of w by parts of k, as many clusters as there are processors for, so that each has about the same
// rows and none computes twice: the rows of x come over the same road as the weights, and row_ring.cuh,
// which brings them with every 16 rows, is bound by it. Two warps copy, a box of weights and one of x a slot of
// the ring; two warpgroups compute 64 rows each, or, where there are no more than 64, every other chunk. The
// sums then go to the blocks of the cluster through distributed shared memory, each of which adds those of some
// rows, in the order of the parts of k.
//
// Weights are on their way before the kernel waits for its input. A row's bits depend on n and k, and where
// there are no more than kBoxWide outputs on whether there are more than 8 rows.
#pragma once

#include "ops/cuda/box_slots.cuh"
#include "ops/cuda/cluster.cuh"
#include "ops/cuda/few_rows_types.cuh"
#include "ops/cuda/tensor_map.cuh"

#include <algorithm>

namespace llaisys::ops::cuda {

constexpr int kBoxRows = 16;     // most rows of x
constexpr int kBoxAtom = 16;     // rows of w that a warp has of a tile
constexpr int kBoxMostAtoms = 8; // of a cluster: two tiles
constexpr int kBoxGroups = 2;    // warpgroups that compute
constexpr int kBoxThreads = (kBoxGroups * 4 + 2) * kWarp;
constexpr int kBoxMostSlots = 16;
constexpr uint32_t kBoxBarrierBytes = 1024;

struct BoxProduct {
    const void *x; // [m, k], rows ldx apart
    int64_t ldx;
    const void *w; // [n, k]
    int m, n, k;
    float *out; // [m, n], rows ldo apart
    int64_t ldo;
    bool adds;
};

struct BoxMaps {
    CUtensorMap w, x;
};

// What may be tried out; the defaults are what runs.
struct BoxTuning {
    int cluster = 0;
    size_t ring_bytes = 0, early_bytes = 0, slot_bytes = 0; // the last: about
};

// Measured inside a decode step of two models: wide outputs want the larger ring, which leaves no room for the
// kernels beside it, narrow ones want their neighbours.
constexpr int kBoxWide = 2048; // outputs
constexpr BoxTuning kBoxOfWide = {2, 190 << 10, 150 << 10, 24 << 10};
constexpr BoxTuning kBoxOfNarrow = {4, 80 << 10, 54 << 10, 12 << 10}; // up to 8 columns
constexpr BoxTuning kBoxOfNarrow16 = {8, 80 << 10, 36 << 10, 24 << 10};

// How a product is cut, and where things lie in shared memory.
struct BoxShape {
    int cluster, atoms; // blocks that share so many atoms of w
    int chunks;         // of 64 values of k, a block
    int chunks_a_slot, n_slots, early_slots;
    bool takes_turns; // the warpgroups, at the chunks
    // From a warpgroup's chunk to its next: chunks, whole slots, chunks on top of these.
    int step, step_slots, step_in_slot;
    uint32_t x_at, slot_bytes, sums_at, bytes;
};

inline BoxShape box_shape(const device::CudaStream &stream, int n, int k, int columns,
                          BoxTuning tuning) {
    const BoxTuning usual = n > kBoxWide   ? kBoxOfWide
                            : columns <= 8 ? kBoxOfNarrow
                                           : kBoxOfNarrow16;
    BoxShape s{};
    s.cluster = tuning.cluster > 0 ? tuning.cluster : usual.cluster;
    // Clusters lie within groups of processors, which have 16 and more.
    const int clusters = stream.n_processors / 16 * 16 / s.cluster;
    const int n_atoms = n / kBoxAtom;
    s.atoms = (n_atoms + clusters - 1) / std::max(1, clusters);
    s.chunks = (k / kBoxColumns + s.cluster - 1) / s.cluster;
    const uint32_t weights = uint32_t(s.atoms * kBoxAtom) * kBoxRowBytes;
    const uint32_t x = uint32_t(columns) * kBoxRowBytes;
    const size_t slot = tuning.slot_bytes > 0 ? tuning.slot_bytes : usual.slot_bytes;
    s.chunks_a_slot = std::clamp(int(slot / (weights + x)), 1, std::max(1, s.chunks / 3));
    s.x_at = uint32_t(s.chunks_a_slot) * weights;
    s.slot_bytes = uint32_t(s.chunks_a_slot) * (weights + x);
    const size_t ring = tuning.ring_bytes > 0 ? tuning.ring_bytes : usual.ring_bytes;
    const size_t early = tuning.early_bytes > 0 ? tuning.early_bytes : usual.early_bytes;
    s.takes_turns = s.atoms <= 4;
    s.step = s.takes_turns ? kBoxGroups : 1;
    s.step_slots = s.step / s.chunks_a_slot;
    s.step_in_slot = s.step % s.chunks_a_slot;
    const int wanted = (s.chunks + s.chunks_a_slot - 1) / s.chunks_a_slot;
    // A warpgroup holds a slot until it has its next one, which may be the one after the next.
    s.n_slots = std::min({std::max(3, int(ring / s.slot_bytes)), wanted, kBoxMostSlots});
    s.early_slots = std::clamp(int(early / s.slot_bytes), 1, s.n_slots);
    // A tile may look past the weights of the last chunk: at anything, its sums are dropped.
    const uint32_t past = uint32_t((s.atoms + 3) / 4 * 4 - s.atoms) * kBoxAtom * kBoxRowBytes;
    s.sums_at = (kBoxBarrierBytes + uint32_t(s.n_slots) * s.slot_bytes + past + 127) / 128 * 128;
    const auto own = uint32_t((s.atoms + s.cluster - 1) / s.cluster);
    s.bytes = s.sums_at + uint32_t(s.cluster * s.step) * own * uint32_t(columns) * kBoxAtom * 4;
    return s;
}

template <typename T, int Columns>
__global__ void __launch_bounds__(kBoxThreads, 3)
    box_ring_kernel(const __grid_constant__ BoxMaps maps, BoxProduct p, BoxShape shape) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    const uint32_t full = shared_address(shared);
    const uint32_t empty = full + kBoxMostSlots * 8;
    const uint32_t exchange = empty + kBoxMostSlots * 8;
    const uint32_t ring = full + kBoxBarrierBytes;
    const int warp = __shfl_sync(kAll, threadIdx.x / kWarp, 0); // known to be one for the warp
    const int lane = threadIdx.x % kWarp;
    const int group = warp / 4;
    const int tile = shape.takes_turns ? 0 : group;
    const int first_own = shape.takes_turns ? group : 0;
    const int n_groups = shape.takes_turns ? kBoxGroups : (shape.atoms + 3) / 4;
    const int rank = int(blockIdx.x) % shape.cluster;
    const int first_atom = int(blockIdx.x) / shape.cluster * shape.atoms;
    const int n_atoms = p.n / kBoxAtom;
    const int first_chunk = rank * shape.chunks;
    const int own_chunks = max(0, min(shape.chunks, p.k / kBoxColumns - first_chunk));
    constexpr int kAtomSums = Columns / 8 * kWarp;                           // float4
    const int own_atoms = (shape.atoms + shape.cluster - 1) / shape.cluster; // whose sums end here

    allow_next();
    if (threadIdx.x == kBoxGroups * 128) {
        const bool is_ones = shape.takes_turns && shape.chunks_a_slot == 1;
        for (int slot = 0; slot < shape.n_slots; ++slot) {
            barrier_init(full + uint32_t(slot) * 8, 2);
            barrier_init(empty + uint32_t(slot) * 8, uint32_t(is_ones ? 1 : n_groups));
        }
        barrier_init(exchange, 1);
        barriers_are_made();
        const int ending = (shape.atoms - rank + shape.cluster - 1) / shape.cluster;
        barrier_arrive_expecting(exchange,
                                 uint32_t(shape.cluster * shape.step * ending * kAtomSums) * 16);
    }
    __syncthreads();
    cluster_arrive_relaxed();
    // What of the last slot lies behind the part is filled with what follows, which nobody looks at.
    const BoxSlots slots{shape.n_slots, shape.slot_bytes, full, empty};
    if (warp == kBoxGroups * 4) {
        const uint64_t policy = read_once();
        fill_slots(slots, first_chunk, own_chunks, shape.chunks_a_slot, ring, shape.x_at,
                   shape.early_slots, [&](uint32_t to, int chunk, uint32_t barrier) {
                       copy_boxes(to, &maps.w, first_atom * kBoxAtom, chunk, barrier, policy);
                   });
    } else if (warp == kBoxGroups * 4 + 1) {
        const uint64_t policy = read_often();
        fill_slots(slots, first_chunk, own_chunks, shape.chunks_a_slot, ring + shape.x_at,
                   shape.slot_bytes - shape.x_at, 0, [&](uint32_t to, int chunk, uint32_t barrier) {
                       copy_boxes(to, &maps.x, 0, chunk, barrier, policy);
                   });
    }
    wait_for_input();
    if (group < n_groups) {
        const uint32_t weights = uint32_t(shape.atoms * kBoxAtom) * kBoxRowBytes; // of a chunk
        float sums[Columns / 2] = {};
        // All of this is the same for the warp and without branches, so that the compiler keeps it out of the
        // way of the products. One loop, too: of two, one in the other, it makes products that wait for each
        // other.
        int slot = first_own >= shape.chunks_a_slot ? first_own : 0;
        int in_slot = first_own >= shape.chunks_a_slot ? 0 : first_own;
        int before = -1; // slot that is read when the products before these are
        uint32_t parity = 0;
        for (int chunk = first_own; chunk < own_chunks; chunk += shape.step) {
            barrier_wait(full + uint32_t(slot) * 8, parity);
            const uint32_t at = ring + uint32_t(slot) * shape.slot_bytes;
            multiply_chunk<T>(sums,
                              at + uint32_t(in_slot) * weights +
                                  uint32_t(tile * 4 * kBoxAtom) * kBoxRowBytes,
                              at + shape.x_at + uint32_t(in_slot * Columns) * kBoxRowBytes);
            if (before >= 0 && threadIdx.x % 128 == 0) {
                barrier_arrive(empty + uint32_t(before) * 8);
            }
            const int was = slot;
            in_slot += shape.step_in_slot;
            const bool is_read = in_slot >= shape.chunks_a_slot;
            in_slot -= is_read ? shape.chunks_a_slot : 0;
            slot += shape.step_slots + (is_read ? 1 : 0);
            before = slot > was ? was : -1;
            const bool is_last = slot >= shape.n_slots;
            slot -= is_last ? shape.n_slots : 0;
            parity ^= is_last ? 1 : 0;
        }
        products_wait<0>();
        settle(sums);
        cluster_wait(); // the others run and have made their barriers
        const int own = tile * 4 + warp % 4;
        if (own < shape.atoms) {
            const int part = rank * shape.step + first_own;
            const int place = part * own_atoms + own / shape.cluster;
            const auto to_block = uint32_t(own % shape.cluster);
            const uint32_t to = address_in_block(
                full + shape.sums_at + uint32_t(place * kAtomSums + lane) * 16, to_block);
            const uint32_t barrier = address_in_block(exchange, to_block);
#pragma unroll
            for (int j = 0; j < Columns / 8; ++j) {
                store_in_block(
                    to + uint32_t(j * kWarp) * 16,
                    make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]),
                    barrier);
            }
        }
    } else {
        cluster_wait();
    }
    // Of atom rank + cluster * a, rows lane / 4 and 8 further, columns 8 j + lane % 4 * 2 and the next.
    const auto at = [&](int a, int j) {
        const int own = a * shape.cluster + rank;
        const bool is_one = own < shape.atoms && first_atom + own < n_atoms;
        return is_one ? p.out + (8 * j + lane % 4 * 2) * p.ldo +
                            int64_t(first_atom + own) * kBoxAtom + lane / 4
                      : nullptr;
    };
    const auto has = [&](int j, int column) { return 8 * j + lane % 4 * 2 + column < p.m; };
    constexpr int kPieces = Columns / 8;
    float4 before = {}; // of the first piece, on its way while the sums come
    const auto load = [&](const float *from, int j) {
        if (p.adds && from != nullptr) {
            before.x = has(j, 0) ? from[0] : 0.0f;
            before.z = has(j, 0) ? from[8] : 0.0f;
            before.y = has(j, 1) ? from[p.ldo] : 0.0f;
            before.w = has(j, 1) ? from[p.ldo + 8] : 0.0f;
        }
    };
    load(at(warp / kPieces, warp % kPieces), warp % kPieces);
    barrier_wait_cluster(exchange, 0); // from here on nobody stores to this block
    const auto *all = reinterpret_cast<const float4 *>(shared + shape.sums_at);
    for (int i = warp; i < own_atoms * kPieces; i += kBoxThreads / kWarp) {
        const int a = i / kPieces;
        const int j = i % kPieces;
        float *to = at(a, j);
        if (i > warp) {
            load(to, j);
        }
        float4 total = all[a * kAtomSums + j * kWarp + lane];
        for (int part = 1; part < shape.cluster * shape.step; ++part) {
            const float4 more = all[(part * own_atoms + a) * kAtomSums + j * kWarp + lane];
            total =
                make_float4(total.x + more.x, total.y + more.y, total.z + more.z, total.w + more.w);
        }
        if (to != nullptr && has(j, 0)) {
            to[0] = before.x + total.x;
            to[8] = before.z + total.z;
        }
        if (to != nullptr && has(j, 1)) {
            to[p.ldo] = before.y + total.y;
            to[p.ldo + 8] = before.w + total.w;
        }
    }
#endif
}

// Whether this device and shape have it.
inline bool can_box_ring(const device::CudaStream &stream, const BoxProduct &p) {
    return has_wgmma(stream) && encode_tensor_map() != nullptr && p.m >= 1 && p.m <= kBoxRows &&
           p.n % kBoxAtom == 0 && p.k % kBoxColumns == 0 && stream.n_processors >= 16 &&
           box_shape(stream, p.n, p.k, kBoxRows, {}).atoms <= kBoxMostAtoms;
}

// And whether it is the fastest: for one row and more weights than these one_row.cuh is.
constexpr int64_t kBoxMostOfOneRow = 16 << 20;
inline bool wants_box_ring(const device::CudaStream &stream, const BoxProduct &p) {
    return !stream.is_exact && (p.m > 1 || int64_t(p.n) * p.k <= kBoxMostOfOneRow) &&
           can_box_ring(stream, p);
}

template <typename T, int Columns>
void launch_box_ring(const device::CudaStream &stream, const BoxProduct &p,
                     const BoxTuning &tuning) {
    const BoxShape shape = box_shape(stream, p.n, p.k, Columns, tuning);
    const auto rows = [&](const void *data, int64_t n, int64_t step, int box) {
        return boxes_of<T, 3>(static_cast<const T *>(data), {kBoxColumns, n, p.k / kBoxColumns},
                              {step, kBoxColumns}, {uint32_t(box), uint32_t(shape.chunks_a_slot)});
    };
    const BoxMaps maps{rows(p.w, p.n, p.k, shape.atoms * kBoxAtom), rows(p.x, p.m, p.ldx, Columns)};
    const int clusters = (p.n / kBoxAtom + shape.atoms - 1) / shape.atoms;
    const auto kernel = box_ring_kernel<T, Columns>;
    allow_shared(kernel, size_t(stream.max_shared_bytes));
    launch(stream, kernel, unsigned(clusters * shape.cluster), kBoxThreads, shape.bytes,
           {true, unsigned(shape.cluster)}, maps, p, shape);
}

template <typename T>
void run_box_ring(const device::CudaStream &stream, const BoxProduct &p,
                  const BoxTuning &tuning = {}) {
    if (p.m <= 8) {
        launch_box_ring<T, 8>(stream, p, tuning);
    } else {
        launch_box_ring<T, 16>(stream, p, tuning);
    }
}

} // namespace llaisys::ops::cuda
