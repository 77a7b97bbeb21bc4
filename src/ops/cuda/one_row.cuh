// Products with one row of x (few_rows_types.cuh, units of one item) on compute capability 9: bound by
// reading the weights once.
//
// One block a processor; every warp has a ring of its own in shared memory, fills it by bulk copies of the
// two weight rows of a unit (or pieces of them, 1 to 4 KB each) and refills a slot as soon as it has read
// it, so that no warp waits for another. A block has neighbouring units, which go round its warps; where
// there are few, a warp has only one of `parts` of their rows. x lies in shared memory: as it came, or,
// where it is normalised, as f32 times the norm's weight; 1 / rms is applied to the sums. A sum: four
// chains a lane, the lanes as a tree, the parts in order.
//
// Weights are on their way before the kernel waits for its input: all slots of a ring. In return a kernel
// lets the next one in only when it has asked for all but the last of its own: then memory is never without
// requests, and the two do not take turns. How much shared memory a block takes decides whether the next
// one finds room beside it, and whether two of one kernel do: then the processors that come free first get
// two and the others none, and half of them cannot read as fast as memory gives (docs/internals/measurements/performance.md).
#pragma once

#include "ops/cuda/bulk.cuh"
#include "ops/cuda/few_rows_types.cuh"

#include <algorithm>

namespace llaisys::ops::cuda {

constexpr int kOneRowFewWarps = 8;    // of a block, at least
constexpr int kOneRowManyWarps = 12;  // at least, where there are so many units
constexpr int kOneRowMostWarps = 14;  // two such blocks leave a thread 72 registers
constexpr int kOneRowNormVectors = 4; // of 4 values that a thread has of a row that is normalised
constexpr int kOneRowLongest = 32 << 10; // values of x

// What may be tried out; 0: as it runs.
struct OneRowTuning {
    int warps = 0;
    int parts = 0; // divides warps
    int piece = 0; // most values of a slot
    int slots = 0; // a warp
    int late = 0;  // pieces yet to be asked for when the next kernel may come
};
// A block has large rings if it normalises x and reads much, or if its rows are long.
constexpr int64_t kOneRowLongWay = 400 * 1000; // bytes of weights that one block reads
constexpr int kOneRowLongRow = 4096;           // values of x
constexpr int kOneRowLongRing = 168 << 10;     // bytes of a block's rings there
constexpr int kOneRowRing = 84 << 10;          // and else
constexpr int kOneRowShared = 208 << 10;       // bytes of rings and x, at most
constexpr int kOneRowLate = 1;

// How the work is cut, and where things lie in shared memory: rings, x, sums, squares, barriers.
struct OneRowShape {
    int n_units, warps, parts, part, piece, pieces, slots, late;
    uint32_t x_at, sums_at, squares_at, barriers_at, bytes;
};

struct OneRowCut {
    int warps, parts;
};
// With which of them the warps are busy longest together; the end of a part counts for 64 values.
inline OneRowCut one_row_cut(int units, int k, bool norms) {
    const int holding = norms ? (k - 1) / (kWarp * 4 * kOneRowNormVectors) + 1 : 1; // all of x
    const int least = std::clamp(units, kOneRowFewWarps, kOneRowManyWarps);
    OneRowCut best{};
    int64_t lowest = INT64_MAX;
    for (int warps = std::max(least, holding); warps <= kOneRowMostWarps; ++warps) {
        for (int parts = 1; parts <= warps; ++parts) {
            const int at_once = warps / parts; // units
            const int64_t rounds = (units + at_once - 1) / at_once;
            const int64_t cost = rounds * (k / parts + 64) * warps;
            if (warps % parts == 0 && cost < lowest) {
                lowest = cost;
                best = {warps, parts};
            }
        }
    }
    return best;
}

inline OneRowShape one_row_shape(const FewRowsInput &in, int n_units, int grid,
                                 const OneRowTuning &tuning) {
    constexpr int kLine = 64; // values that lie on one line of the cache
    const bool norms = in.residual != nullptr;
    const int units = (n_units + grid - 1) / grid; // of a block, at most
    const OneRowCut cut = one_row_cut(units, in.k, norms);
    const bool has_long_rows = !norms && in.k > kOneRowLongRow;
    const bool is_long = has_long_rows || (norms && int64_t(units) * in.k * 4 > kOneRowLongWay);
    const int x_bytes = in.k * (norms ? 4 : 2);
    const auto choose = [](int tuned, int usual) { return tuned > 0 ? tuned : usual; };
    OneRowShape s{};
    s.n_units = n_units;
    s.warps = choose(tuning.warps, cut.warps);
    s.parts = choose(tuning.parts, cut.parts);
    s.part = (in.k + s.parts * 8 - 1) / (s.parts * 8) * 8;
    const int ring = std::min(is_long ? kOneRowLongRing : kOneRowRing, kOneRowShared - x_bytes);
    const int slots = choose(tuning.slots, has_long_rows ? 3 : 2);
    const int most = choose(tuning.piece, ring / (slots * 4 * s.warps) / kLine * kLine);
    s.pieces = (s.part + most - 1) / most;
    s.piece = (s.part + s.pieces * kLine - 1) / (s.pieces * kLine) * kLine;
    const int at_once = s.warps / s.parts;
    const int wanted = (units + at_once - 1) / at_once * s.pieces;
    s.slots = std::min(slots, wanted);
    s.late = choose(tuning.late, kOneRowLate);
    s.x_at = (uint32_t(s.warps * s.slots * s.piece) * 4 + 127) / 128 * 128;
    s.sums_at = s.x_at + (uint32_t(x_bytes) + 15) / 16 * 16;
    s.squares_at = s.sums_at + uint32_t(2 * units * s.parts) * 4;
    s.barriers_at = (s.squares_at + uint32_t(s.warps) * 4 + 7) / 8 * 8;
    s.bytes = s.barriers_at + uint32_t(s.warps * s.slots) * 8;
    return s;
}

// Two neighbouring values.
template <typename T> __device__ __forceinline__ float2 unpack_pair(uint32_t bits);
template <> __device__ __forceinline__ float2 unpack_pair<bf16>(uint32_t bits) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack_pair<f16>(uint32_t bits) {
    return __half22float2(*reinterpret_cast<const __half2 *>(&bits));
}

struct RowOfEight { // values of x
    float4 low, high;
};
// Values 8 i to 8 i + 7 of the row that take_row left.
template <typename T, bool Norms>
__device__ __forceinline__ RowOfEight row_of_eight(const unsigned char *row, int i, int k) {
    if constexpr (Norms) {
        const auto *x = reinterpret_cast<const float4 *>(row);
        return {x[i], x[k / 8 + i]};
    } else {
        const uint4 x = reinterpret_cast<const uint4 *>(row)[i];
        const float2 a = unpack_pair<T>(x.x), b = unpack_pair<T>(x.y);
        const float2 c = unpack_pair<T>(x.z), d = unpack_pair<T>(x.w);
        return {make_float4(a.x, a.y, b.x, b.y), make_float4(c.x, c.y, d.x, d.y)};
    }
}

template <typename T>
__device__ __forceinline__ void add_products(float (&sums)[4], const uint4 &w,
                                             const RowOfEight &x) {
    const float2 a = unpack_pair<T>(w.x), b = unpack_pair<T>(w.y);
    const float2 c = unpack_pair<T>(w.z), d = unpack_pair<T>(w.w);
    sums[0] = fmaf(a.x, x.low.x, sums[0]);
    sums[1] = fmaf(a.y, x.low.y, sums[1]);
    sums[2] = fmaf(b.x, x.low.z, sums[2]);
    sums[3] = fmaf(b.y, x.low.w, sums[3]);
    sums[0] = fmaf(c.x, x.high.x, sums[0]);
    sums[1] = fmaf(c.y, x.high.y, sums[1]);
    sums[2] = fmaf(d.x, x.high.z, sums[2]);
    sums[3] = fmaf(d.y, x.high.w, sums[3]);
}

// x into shared memory. Of every 8 values of a normalised row the first four lie in one half and the others
// in the second: so the lanes' 16-byte reads meet different banks. Leaves each warp's sum of squares.
template <typename T, bool Norms>
__device__ __forceinline__ void take_row(unsigned char *shared, const OneRowShape &s,
                                         const FewRowsInput &in,
                                         const float4 (&scale)[kOneRowNormVectors]) {
    if constexpr (Norms) {
        const auto *from = reinterpret_cast<const float4 *>(in.residual_row(0));
        auto *to = reinterpret_cast<float4 *>(shared + s.x_at);
        float4 values[kOneRowNormVectors];
        float squares = 0;
#pragma unroll
        for (int j = 0; j < kOneRowNormVectors; ++j) {
            const int at = threadIdx.x + j * blockDim.x;
            values[j] = at < in.k / 4 ? from[at] : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < kOneRowNormVectors; ++j) {
            const int at = threadIdx.x + j * blockDim.x;
            const float4 v = values[j], w = scale[j];
            squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
            if (at < in.k / 4) {
                to[(at & 1) * (in.k / 8) + at / 2] =
                    make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
            }
        }
        squares = warp_sum(squares);
        if (threadIdx.x % kWarp == 0) {
            reinterpret_cast<float *>(shared + s.squares_at)[threadIdx.x / kWarp] = squares;
        }
    } else {
        const auto *from = static_cast<const uint4 *>(in.x);
        auto *to = reinterpret_cast<uint4 *>(shared + s.x_at);
#pragma unroll 4
        for (int at = threadIdx.x; at < in.k / 8; at += blockDim.x) {
            to[at] = from[at];
        }
    }
}

template <typename T, bool Norms, typename Use>
__global__ void __launch_bounds__(kOneRowMostWarps *kWarp, 2)
    one_row_kernel(FewRowsInput in, Use use, OneRowShape s) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char shared[];
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const int first = int(int64_t(blockIdx.x) * s.n_units / gridDim.x);
    const int own_units = int(int64_t(blockIdx.x + 1) * s.n_units / gridDim.x) - first;
    // This warp: a part of units first_unit, + at_once, ...
    const int at_once = s.warps / s.parts;
    const int first_unit = warp / s.parts;
    const int part = warp - first_unit * s.parts;
    const int part_begin = part * s.part;
    const int part_end = min(part_begin + s.part, in.k);
    const uint32_t row_bytes = uint32_t(s.piece) * 2; // of a slot
    const uint32_t ring_at = uint32_t(warp * s.slots) * 2 * row_bytes;
    const uint32_t full = shared_address(shared) + s.barriers_at + uint32_t(warp * s.slots) * 8;

    int left = (max(0, own_units - first_unit) + at_once - 1) / at_once * s.pieces; // to copy
    if (left <= s.late) {
        allow_next();
    }
    // What is copied next: by lane 0 of the first row of a unit, by lane 1 of the second.
    int fill_unit = first_unit, fill_begin = part_begin, fill_slot = 0;
    const T *row = nullptr;
    const uint64_t policy = read_once();
    const uint32_t fill_to = shared_address(shared) + ring_at + uint32_t(lane & 1) * row_bytes;
    const auto fill = [&] {
        if (left == 0) {
            return;
        }
        if (--left == s.late) {
            allow_next();
        }
        if (fill_begin == part_begin) {
            row = use.row(first + fill_unit, lane & 1, 0);
            if (row == nullptr) { // any other: its sum is dropped
                row = use.row(first + fill_unit, 0, 0);
            }
        }
        const uint32_t bytes = uint32_t(max(0, min(s.piece, part_end - fill_begin))) * 2;
        const uint32_t barrier = full + uint32_t(fill_slot) * 8;
        if (lane == 0) {
            barrier_arrive_expecting(barrier, 2 * bytes);
        }
        if (lane < 2 && bytes > 0) {
            copy_bulk(fill_to + uint32_t(fill_slot) * 2 * row_bytes, row + fill_begin, bytes,
                      barrier, policy);
        }
        fill_slot = fill_slot + 1 == s.slots ? 0 : fill_slot + 1;
        fill_begin += s.piece;
        if (fill_begin >= part_begin + s.pieces * s.piece) {
            fill_begin = part_begin;
            fill_unit += at_once;
        }
    };
    if (lane == 0) {
        for (int slot = 0; slot < s.slots; ++slot) {
            barrier_init(full + uint32_t(slot) * 8, 1);
        }
        barriers_are_made();
    }
    __syncwarp();
    for (int slot = 0; slot < s.slots; ++slot) {
        fill();
    }
    float4 scale[kOneRowNormVectors]; // a weight: it may be read early
    if constexpr (Norms) {
#pragma unroll
        for (int j = 0; j < kOneRowNormVectors; ++j) {
            const int at = threadIdx.x + j * blockDim.x;
            scale[j] = at < in.k / 4 ? reinterpret_cast<const float4 *>(in.norm_weight)[at]
                                     : make_float4(0, 0, 0, 0);
        }
    }
    // The unit whose sums this thread stores: the last warps, which have the fewest, begin.
    const int own = int(blockDim.x - 1 - threadIdx.x);
    typename Use::Held held{};
    if (own < own_units) {
        held = use.hold_weights(first + own, 0);
    }
    wait_for_input();
    take_row<T, Norms>(shared, s, in, scale);
    if (own < own_units) {
        use.hold_rows(first + own, 0, 0, &held);
    }
    __syncthreads();

    auto *sums = reinterpret_cast<float *>(shared + s.sums_at);
    int slot = 0;
    uint32_t parity = 0;
    for (int unit = first_unit; unit < own_units; unit += at_once) {
        float low[4] = {}, high[4] = {};
        for (int piece = 0; piece < s.pieces; ++piece) {
            const int begin = part_begin + piece * s.piece;
            const int chunks = min(s.piece, part_end - begin) / 8; // none: not above 0
            const auto *low_row =
                reinterpret_cast<const uint4 *>(shared + ring_at + uint32_t(slot) * 2 * row_bytes);
            const auto *high_row = low_row + row_bytes / 16;
            barrier_wait(full + uint32_t(slot) * 8, parity);
#pragma unroll 3
            for (int c = lane; c < chunks; c += kWarp) {
                const RowOfEight x = row_of_eight<T, Norms>(shared + s.x_at, begin / 8 + c, in.k);
                add_products<T>(low, low_row[c], x);
                add_products<T>(high, high_row[c], x);
            }
            __syncwarp();
            fill();
            if (++slot == s.slots) {
                slot = 0;
                parity ^= 1;
            }
        }
        float low_sum = (low[0] + low[1]) + (low[2] + low[3]);
        float high_sum = (high[0] + high[1]) + (high[2] + high[3]);
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) {
            low_sum += __shfl_xor_sync(kAll, low_sum, step);
            high_sum += __shfl_xor_sync(kAll, high_sum, step);
        }
        if (lane == 0) {
            sums[2 * unit * s.parts + part] = low_sum;
            sums[(2 * unit + 1) * s.parts + part] = high_sum;
        }
    }
    float factor = 1;
    typename Use::Ready ready{};
    if (own < own_units) {
        if constexpr (Norms) {
            float squares = 0;
            for (int w = 0; w < s.warps; ++w) {
                squares += reinterpret_cast<const float *>(shared + s.squares_at)[w];
            }
            factor = 1.0f / sqrtf(squares / float(in.k) + in.epsilon);
        }
        ready = use.ready(first + own, 0, held);
    }
    __syncthreads();
    for (int u = own; u < own_units; u += int(blockDim.x)) {
        if (u != own) {
            ready = use.ready(first + u, 0, hold(use, first + u, 0, 0));
        }
        float low = 0;
        float high = 0;
        for (int i = 0; i < s.parts; ++i) {
            low += sums[2 * u * s.parts + i];
            high += sums[(2 * u + 1) * s.parts + i];
        }
        use.store(first + u, 0, 0, low * factor, high * factor, ready);
    }
#endif
}

// Whether this device and this row have it; a row that is to be normalised must fit as well.
inline bool can_one_row(const device::CudaStream &stream, int64_t m, int64_t k, bool norms) {
    return has_bulk_copies(stream) && !stream.is_exact && m == 1 && k % 8 == 0 &&
           k <= kOneRowLongest &&
           (!norms || k <= kOneRowManyWarps * kWarp * 4 * kOneRowNormVectors);
}

template <typename T, typename Use>
void run_one_row(const device::CudaStream &stream, const FewRowsInput &in, Use use,
                 const OneRowTuning &tuning = {}) {
    use.items = 1;
    const int n_units = int(use.count());
    const int grid = std::min(stream.n_processors, n_units);
    const OneRowShape shape = one_row_shape(in, n_units, grid, tuning);
    const auto run = [&](auto kernel) {
        allow_shared(kernel,
                     size_t(stream.max_shared_bytes)); // a recorded launch may have had more
        launch(stream, kernel, unsigned(grid), unsigned(shape.warps * kWarp), shape.bytes, true, in,
               use, shape);
    };
    if (in.residual == nullptr) {
        run(one_row_kernel<T, false, Use>);
    } else {
        run(one_row_kernel<T, true, Use>);
    }
}

} // namespace llaisys::ops::cuda
