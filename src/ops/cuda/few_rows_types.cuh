// Products with few rows, out[m, n] = x[m, k] * w[n, k]^T: what their kernels are given.
//
// The weights are the 16-row operand of the tensor cores and the rows of x its 8 columns. A kernel
// works through units of two groups of up to 8 weight rows that may lie anywhere (gate and up, the two
// halves of a head). What a unit is and what becomes of its sums is up to `Use`:
//
//   int items                            rows of a group in a unit, 1 to 8
//   int64_t count() const                of a group in all
//   const T *row(unit, group, i)         where a weight row begins; null where there is none
//   Held hold_weights(unit, i)           what store needs of memory, as it lies there, so that nobody waits
//   void hold_rows(unit, i, row, &held)  for it before ready(): of the model's own, which may be read before
//                                        the kernel's input is there; the rest, read while sums are made
//   Ready ready(unit, i, held)           what can be made of that without the sums
//   void store(unit, i, row, low, high, ready)
//                                        sums of row i of both groups with row `row` of x
#pragma once

#include "ops/cuda/common.cuh"

namespace llaisys::ops::cuda {

// The rows of x: either 16-bit rows, or f32 rows that are normalised on the way in.
struct FewRowsInput {
    const void *x; // T [m, k], null when `residual` is given
    int64_t ldx;
    int m;
    int k;                 // a multiple of 8
    const float *residual; // f32 [.., k]
    int64_t ld_residual;
    const int32_t *rows; // which rows of residual, null: the first
    const float *norm_weight;
    float epsilon;

    __device__ __forceinline__ const float *residual_row(int row) const {
        return residual + (rows != nullptr ? int64_t(rows[row]) : int64_t(row)) * ld_residual;
    }
};

struct NothingHeld {};

template <typename Use>
__device__ __forceinline__ typename Use::Held hold(const Use &use, int unit, int i, int row) {
    typename Use::Held held = use.hold_weights(unit, i);
    use.hold_rows(unit, i, row, &held);
    return held;
}

// Where the weights of units of 8 items lie, for kernels that copy boxes: unit h * a_head + u has rows
// data + h * to_next_head + u * to_next + i * k of one group, and of the other to_other values further.
template <typename T> struct AtomPlaces {
    const T *data;
    int64_t to_other, to_next, to_next_head; // in values
    int64_t a_head, count;                   // units

    bool is_possible() const {
        return count > 0 && to_other > 0 && to_other % 8 == 0 && to_next % 8 == 0 &&
               to_next_head % 8 == 0;
    }
};

// Items of a unit, 1 to 8, with which the processor that has most to do has least; the end of a unit
// counts for two items.
inline int items_of_unit(const device::CudaStream &stream, int64_t count) {
    int best = 8;
    int64_t least = INT64_MAX;
    for (int items = 8; items >= 4; --items) {
        const int64_t units = (count + items - 1) / items;
        const int64_t rounds = (units + stream.n_processors - 1) / stream.n_processors;
        const int64_t cost = rounds * (2 * items + 4);
        if (cost < least) {
            least = cost;
            best = items;
        }
    }
    return count < best ? int(count < 1 ? 1 : count) : best;
}

// out (+)= sums + bias; a unit is 2 * items neighbouring outputs.
template <typename T> struct StoreRows {
    struct Held { // of both groups
        uint2 bias, before;
    };
    using Ready = float2; // what is added to the sums

    const T *w; // [n, k]
    int64_t n, k;
    Reals bias; // data null: none
    Reals out;
    int64_t ldo;
    bool adds;
    int items;

    // None where 16 outputs are too many.
    AtomPlaces<T> atoms() const {
        return {w, 8 * k, 16 * k, 16 * k, n / 16, n % 16 == 0 ? n / 16 : 0};
    }
    __host__ __device__ int64_t count() const { return (n + 1) / 2; }
    __device__ __forceinline__ int64_t output(int unit, int group, int i) const {
        return (int64_t(unit) * 2 + group) * items + i;
    }
    __device__ __forceinline__ const T *row(int unit, int group, int i) const {
        const int64_t at = output(unit, group, i);
        return i < items && at < n ? w + at * k : nullptr;
    }
    __device__ __forceinline__ bool has(int unit, int group, int i) const {
        return i < items && output(unit, group, i) < n;
    }
    __device__ __forceinline__ Held hold_weights(int unit, int i) const {
        Held held{};
        if (bias.data != nullptr) {
            held.bias.x = has(unit, 0, i) ? bias.load_bits(output(unit, 0, i)) : 0;
            held.bias.y = has(unit, 1, i) ? bias.load_bits(output(unit, 1, i)) : 0;
        }
        return held;
    }
    __device__ __forceinline__ void hold_rows(int unit, int i, int row, Held *held) const {
        if (adds) {
            held->before.x = has(unit, 0, i) ? out.load_bits(row * ldo + output(unit, 0, i)) : 0;
            held->before.y = has(unit, 1, i) ? out.load_bits(row * ldo + output(unit, 1, i)) : 0;
        }
    }
    __device__ __forceinline__ Ready ready(int, int, const Held &held) const {
        return {bias.value_of(held.bias.x) + out.value_of(held.before.x),
                bias.value_of(held.bias.y) + out.value_of(held.before.y)};
    }
    __device__ __forceinline__ void store(int unit, int i, int row, float low, float high,
                                          Ready added) const {
        if (has(unit, 0, i)) {
            out.store(row * ldo + output(unit, 0, i), low + added.x);
        }
        if (has(unit, 1, i)) {
            out.store(row * ldo + output(unit, 1, i), high + added.y);
        }
    }
};

} // namespace llaisys::ops::cuda
