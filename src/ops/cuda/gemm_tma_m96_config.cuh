// Tiling and shared memory layout of gemm_tma_m96.cuh.
#pragma once

#include "ops/cuda/gemm_epilogue.cuh"
#include "ops/cuda/tma.cuh"
#include "ops/cuda/tuning_sm90.hpp"

#include <algorithm>
#include <numeric>

namespace llaisys::ops::cuda {

constexpr int kM96MaxM = 96;     // largest M
constexpr int kM96MaxAtoms = 20; // per block
constexpr int kM96Threads = kM96MaxAtoms * kWarpSize + 2 * kWarpSize;
constexpr int kM96MaxStages = 24;
constexpr uint32_t kM96BarrierBytes = 1024;
constexpr uint32_t kM96AtomBytes = 16 * kTmaRowBytes;  // of one K tile
constexpr uint32_t kM96FragmentBytes = kWarpSize * 16; // partial sums of one atom and 8 rows of x

// Clusters that run at once. A cluster is placed within one GPC, which has at least 16 SMs.
inline int clusters_at_once(const device::CudaStream &stream, int cluster) {
    return cluster == 1 ? stream.n_sms : std::max(1, stream.n_sms / 16 * 16 / cluster);
}

struct AtomTiles {
    int cluster, atoms;          // blocks per cluster; atoms per cluster
    int n_atoms, atoms_per_head; // in all; per head (AtomLayout)
    int load_atoms;              // atoms per TMA load, all of one head

    // At most `most` atoms per cluster.
    AtomTiles(const device::CudaStream &stream, int blocks, int64_t count, int64_t of_head,
              int most)
        : cluster(blocks), n_atoms(int(count)), atoms_per_head(int(of_head)) {
        const int at_once = clusters_at_once(stream, cluster);
        const int rounds = (n_atoms + at_once * most - 1) / (at_once * most);
        atoms = (n_atoms + at_once * rounds - 1) / (at_once * rounds);
        // allows larger TMA tiles
        atoms += atoms_per_head < n_atoms && atoms > 1 ? atoms % 2 : 0;
        load_atoms = atoms_per_head < n_atoms ? std::gcd(atoms, atoms_per_head) : atoms;
    }
    // Shared memory of the partial sums of a cluster that splits K.
    uint32_t exchange_bytes(int columns) const {
        const auto fragments = uint32_t(atoms * columns / 8), blocks = uint32_t(cluster);
        return blocks > 1 ? blocks * ((fragments + blocks - 1) / blocks) * kM96FragmentBytes : 0;
    }
};

struct M96Config : AtomTiles {
    using AtomTiles::AtomTiles;
    int k_tiles, all_k_tiles;
    int n_stages, prefetch_stages;
    uint32_t x_at, stage_bytes, sums_at, bytes;

    bool fits(const device::CudaStream &stream) const {
        return atoms <= kM96MaxAtoms && bytes <= uint32_t(stream.max_shared_bytes);
    }
};

template <typename T>
M96Config m96_config(const device::CudaStream &stream, const AtomLayout<T> &layout, int64_t k,
                     int columns, const M96Tuning &tuning) {
    M96Config s(stream, tuning.cluster, layout.count, layout.atoms_per_head, kM96MaxAtoms);
    s.all_k_tiles = int((k + kTmaTileK - 1) / kTmaTileK);
    s.k_tiles = (s.all_k_tiles + s.cluster - 1) / s.cluster;
    s.x_at = uint32_t(s.atoms) * kM96AtomBytes;
    s.stage_bytes = s.x_at + uint32_t(columns) * kTmaRowBytes;
    s.n_stages =
        std::min({std::max(2, int(tuning.buffer_bytes / s.stage_bytes)), s.k_tiles, kM96MaxStages});
    s.prefetch_stages = std::clamp(int(tuning.prefetch_bytes / s.x_at), 1, s.n_stages);
    // A group of four atoms may read past the last stage; those sums are dropped.
    const uint32_t past = uint32_t((s.atoms + 3) / 4 * 4 - s.atoms) * kM96AtomBytes;
    const uint32_t end = kM96BarrierBytes + uint32_t(s.n_stages) * s.stage_bytes;
    const uint32_t x = uint32_t(columns) * kTmaRowBytes;
    s.sums_at = end + std::max(past, x) - x;
    s.bytes = s.sums_at + s.exchange_bytes(columns);
    if (tuning.exclusive_sm) {
        s.bytes = std::max(s.bytes, uint32_t(stream.max_shared_bytes) / 2 + 1024);
    }
    return s;
}

constexpr int m96_columns(int64_t m) { return m <= 32 ? 32 : m <= 64 ? 64 : 96; }

} // namespace llaisys::ops::cuda
