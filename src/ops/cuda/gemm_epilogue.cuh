// Inputs and epilogues of the small-M GEMMs, out[m, n] = x[m, k] * w[n, k]^T.
//
// The weights are the 16-row operand of the tensor cores and the rows of x are its 8 columns. A
// kernel processes units of two groups of up to 8 weight rows; the groups may lie apart (gate and
// up, the two halves of a head). The Epilogue type defines the units and consumes the
// accumulators:
//
//   int items                             weight rows per group and unit, 1 to 8
//   int64_t count() const                 weight rows per group in all
//   const T *row(unit, group, i)          address of a weight row; null: none
//   int64_t row_index(unit, group, i)     the row among adjacent weights; negative: none
//   Operands load_weights(unit, i)        loads of model constants that store() needs; legal before
//                                         grid_dependency_wait()
//   void load_rows(unit, i, row, &ops)    loads of operands that depend on the row of x; issued while
//                                         the accumulators are computed
//   Prepared prepare(unit, i, ops)        conversion of the loaded bits, without the accumulators
//   void store(unit, i, row, low, high, prepared)
//                                         accumulators of row i of both groups for row `row` of x
#pragma once

#include "ops/cuda/common.cuh"

namespace llaisys::ops::cuda {

// Rows of x: 16-bit rows, or f32 rows of the residual stream that the kernel normalizes.
struct GemmInput {
    const void *x; // T [m, k]; null when `residual` is set
    int64_t ldx;
    int m;
    int k;                 // multiple of 8
    const float *residual; // f32 [.., k]
    int64_t ld_residual;
    const int32_t *rows; // row indices into residual; null: 0 .. m - 1
    const float *norm_weight;
    float epsilon;

    __device__ __forceinline__ const float *residual_row(int row) const {
        return residual + (rows != nullptr ? int64_t(rows[row]) : int64_t(row)) * ld_residual;
    }
};

struct NoOperands {};

template <typename Epilogue>
__device__ __forceinline__ typename Epilogue::Operands load_operands(const Epilogue &epilogue,
                                                                     int unit, int i, int row) {
    typename Epilogue::Operands operands = epilogue.load_weights(unit, i);
    epilogue.load_rows(unit, i, row, &operands);
    return operands;
}

// Weight layout for kernels that use TMA, units of 8 items: unit h * atoms_per_head + u has rows
// data + h * head_stride + u * atom_stride + i * k in group 0, and group_stride values further in
// group 1.
template <typename T> struct AtomLayout {
    const T *data;
    int64_t group_stride, atom_stride, head_stride; // in values
    int64_t atoms_per_head, count;                  // units

    bool is_valid() const {
        return count > 0 && group_stride > 0 && group_stride % 8 == 0 && atom_stride % 8 == 0 &&
               head_stride % 8 == 0;
    }
};

// The same for adjacent quantised weights, as row indices.
struct AtomRows {
    int64_t group, atom, head;     // rows from a group, atom or head to the next
    int64_t atoms_per_head, count; // units; count 0: not supported
};

// Items per unit, 1 to 8, that minimize the work of the most loaded SM. The epilogue of a unit
// counts as two items.
inline int choose_unit_items(const device::CudaStream &stream, int64_t count) {
    int best = 8;
    int64_t least = INT64_MAX;
    for (int items = 8; items >= 4; --items) {
        const int64_t units = (count + items - 1) / items;
        const int64_t rounds = (units + stream.n_sms - 1) / stream.n_sms;
        const int64_t cost = rounds * (2 * items + 4);
        if (cost < least) {
            least = cost;
            best = items;
        }
    }
    return count < best ? int(count < 1 ? 1 : count) : best;
}

// Epilogue out (+)= acc + bias; a unit is 2 * items adjacent outputs.
template <typename T> struct LinearEpilogue {
    struct Operands { // of both groups
        uint2 bias, before;
    };
    using Prepared = float2; // added to the accumulators

    const T *w; // [n, k]
    int64_t n, k;
    Reals bias; // data null: none
    Reals out;
    int64_t ldo;
    bool adds;
    int items;

    // Empty unless n is a multiple of 16.
    AtomLayout<T> atoms() const {
        return {w, 8 * k, 16 * k, 16 * k, n / 16, n % 16 == 0 ? n / 16 : 0};
    }
    AtomRows atom_rows() const { return {8, 16, 16, n / 16, n % 16 == 0 ? n / 16 : 0}; }
    __host__ __device__ int64_t count() const { return (n + 1) / 2; }
    __device__ __forceinline__ int64_t output(int unit, int group, int i) const {
        return (int64_t(unit) * 2 + group) * items + i;
    }
    __device__ __forceinline__ const T *row(int unit, int group, int i) const {
        const int64_t at = row_index(unit, group, i);
        return at >= 0 ? w + at * k : nullptr;
    }
    __device__ __forceinline__ int64_t row_index(int unit, int group, int i) const {
        const int64_t at = output(unit, group, i);
        return i < items && at < n ? at : -1;
    }
    __device__ __forceinline__ bool has(int unit, int group, int i) const {
        return i < items && output(unit, group, i) < n;
    }
    __device__ __forceinline__ Operands load_weights(int unit, int i) const {
        Operands operands{};
        if (bias.data != nullptr) {
            operands.bias.x = has(unit, 0, i) ? bias.load_bits(output(unit, 0, i)) : 0;
            operands.bias.y = has(unit, 1, i) ? bias.load_bits(output(unit, 1, i)) : 0;
        }
        return operands;
    }
    __device__ __forceinline__ void load_rows(int unit, int i, int row, Operands *operands) const {
        if (adds) {
            operands->before.x =
                has(unit, 0, i) ? out.load_bits(row * ldo + output(unit, 0, i)) : 0;
            operands->before.y =
                has(unit, 1, i) ? out.load_bits(row * ldo + output(unit, 1, i)) : 0;
        }
    }
    __device__ __forceinline__ Prepared prepare(int, int, const Operands &operands) const {
        return {bias.value_of(operands.bias.x) + out.value_of(operands.before.x),
                bias.value_of(operands.bias.y) + out.value_of(operands.before.y)};
    }
    __device__ __forceinline__ void store(int unit, int i, int row, float low, float high,
                                          Prepared added) const {
        if (has(unit, 0, i)) {
            out.store(row * ldo + output(unit, 0, i), low + added.x);
        }
        if (has(unit, 1, i)) {
            out.store(row * ldo + output(unit, 1, i), high + added.y);
        }
    }
};

} // namespace llaisys::ops::cuda
