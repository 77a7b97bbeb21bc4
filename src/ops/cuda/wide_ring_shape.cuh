// How wide_ring.cuh cuts a product, and where things lie in shared memory.
#pragma once

#include "ops/cuda/few_rows_types.cuh"
#include "ops/cuda/tensor_map.cuh"

#include <algorithm>
#include <numeric>

namespace llaisys::ops::cuda {

constexpr int kWideRows = 96;      // most rows of x
constexpr int kWideMostAtoms = 20; // of a block
constexpr int kWideThreads = kWideMostAtoms * kWarp + 2 * kWarp;
constexpr int kWideMostSlots = 24;
constexpr uint32_t kWideBarrierBytes = 1024;
constexpr uint32_t kWideAtomBytes = 16 * kBoxRowBytes; // of a chunk
constexpr uint32_t kWidePieceBytes = kWarp * 16;       // sums of an atom and 8 rows of x

// How a product is cut; measured inside decode steps (docs/internals/measurements/performance.md).
struct WideTuning {
    int cluster = 1;
    size_t ring_bytes = 128 << 10, early_bytes = 64 << 10;
    bool is_alone = false; // no two blocks on a processor
};

struct WideShape {
    int cluster, atoms;  // blocks that share so many atoms
    int n_atoms, a_head; // in all; of a head (AtomPlaces)
    int box;             // atoms of a copy, all of one head
    int chunks, all_chunks;
    int n_slots, early_slots;
    uint32_t x_at, slot_bytes, sums_at, bytes;

    bool fits(const device::CudaStream &stream) const {
        return atoms <= kWideMostAtoms && bytes <= uint32_t(stream.max_shared_bytes);
    }
};

template <typename T>
WideShape wide_shape(const device::CudaStream &stream, const AtomPlaces<T> &places, int64_t k,
                     int columns, const WideTuning &tuning) {
    WideShape s{};
    s.cluster = tuning.cluster;
    s.n_atoms = int(places.count);
    s.a_head = int(places.a_head);
    // Clusters lie within groups of processors, which have 16 and more.
    const int at_once = s.cluster == 1 ? stream.n_processors
                                       : std::max(1, stream.n_processors / 16 * 16 / s.cluster);
    const int rounds = (s.n_atoms + at_once * kWideMostAtoms - 1) / (at_once * kWideMostAtoms);
    s.atoms = (s.n_atoms + at_once * rounds - 1) / (at_once * rounds);
    s.atoms += s.a_head < s.n_atoms && s.atoms > 1 ? s.atoms % 2 : 0; // for larger boxes
    s.box = s.a_head < s.n_atoms ? std::gcd(s.atoms, s.a_head) : s.atoms;
    s.all_chunks = int((k + kBoxColumns - 1) / kBoxColumns);
    s.chunks = (s.all_chunks + s.cluster - 1) / s.cluster;
    s.x_at = uint32_t(s.atoms) * kWideAtomBytes;
    s.slot_bytes = s.x_at + uint32_t(columns) * kBoxRowBytes;
    s.n_slots =
        std::min({std::max(2, int(tuning.ring_bytes / s.slot_bytes)), s.chunks, kWideMostSlots});
    s.early_slots = std::clamp(int(tuning.early_bytes / s.x_at), 1, s.n_slots);
    // Four atoms may reach past those of the last slot: to anything, its sums are dropped.
    const uint32_t past = uint32_t((s.atoms + 3) / 4 * 4 - s.atoms) * kWideAtomBytes;
    const uint32_t end = kWideBarrierBytes + uint32_t(s.n_slots) * s.slot_bytes;
    const uint32_t x = uint32_t(columns) * kBoxRowBytes;
    s.sums_at = end + std::max(past, x) - x;
    const auto pieces = uint32_t(s.atoms * columns / 8);
    const auto cluster = uint32_t(s.cluster);
    s.bytes = s.sums_at +
              (cluster > 1 ? cluster * ((pieces + cluster - 1) / cluster) * kWidePieceBytes : 0);
    if (tuning.is_alone) {
        s.bytes = std::max(s.bytes, uint32_t(stream.max_shared_bytes) / 2 + 1024);
    }
    return s;
}

constexpr int wide_columns(int64_t m) { return m <= 32 ? 32 : m <= 64 ? 64 : 96; }

// What was the fastest inside a decode step of two models, of rows of 1,536 and of 3,584 values; cluster 0: nothing
// is faster than cuBLASLt. m: rows of x; hidden: values of a row of the residual stream.
constexpr int64_t kWideLong = 2048; // hidden
inline WideTuning wide_attention_input(int64_t m, int64_t hidden) {
    if (hidden > kWideLong) {
        return m <= 32   ? WideTuning{2, 104 << 10, 96 << 10, true}
               : m <= 64 ? WideTuning{4, 170 << 10, 128 << 10}
                         : WideTuning{0};
    }
    return m <= 32   ? WideTuning{4, 128 << 10, 32 << 10}
           : m <= 64 ? WideTuning{4, 170 << 10, 128 << 10}
                     : WideTuning{2, 112 << 10, 64 << 10};
}
inline WideTuning wide_mlp_input(int64_t m, int64_t hidden) {
    if (hidden > kWideLong) {
        return {1, size_t(m <= 32 ? 205 : 170) << 10, 128 << 10, m > 64};
    }
    return {1, size_t(m <= 64 ? 128 : 170) << 10, 64 << 10, true};
}
inline WideTuning wide_adding(int64_t m, int64_t hidden, int64_t k) {
    const bool is_down = k > 2 * hidden;
    if (hidden > kWideLong) {
        if (is_down) {
            return m <= 32   ? WideTuning{2, 170 << 10, 128 << 10}
                   : m <= 64 ? WideTuning{2, 205 << 10, 64 << 10}
                             : WideTuning{2, 170 << 10, 200 << 10};
        }
        return m <= 32 ? WideTuning{4, 96 << 10, 64 << 10} : WideTuning{0};
    }
    if (is_down) {
        return m <= 64 ? WideTuning{4, 96 << 10, size_t(m <= 32 ? 32 : 96) << 10} : WideTuning{0};
    }
    return m <= 32   ? WideTuning{8, 80 << 10, 64 << 10}
           : m <= 64 ? WideTuning{4, 112 << 10, 64 << 10}
                     : WideTuning{2, 170 << 10, 64 << 10};
}

} // namespace llaisys::ops::cuda
