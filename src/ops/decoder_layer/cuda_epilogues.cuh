// Epilogues of the GEMMs of a decoder layer (ops/cuda/gemm_epilogue.cuh), and RoPE + KV store of
// a pair of values.
#pragma once

#include "ops/cuda/gemm_epilogue.cuh"

namespace llaisys::ops::cuda {

// Heads of q, k and v in this order.
struct QkvSections {
    int n_heads, kv_heads, d;
    Reals biases[3]; // data null: none
    const int64_t *positions;
    const float *inv_freq;
    const int32_t *slots;
    int64_t n_slots;

    __host__ __device__ int heads() const { return n_heads + 2 * kv_heads; }
    __device__ __forceinline__ int section_of(int head) const {
        return head < n_heads ? 0 : (head < n_heads + kv_heads ? 1 : 2);
    }
    // Selected by comparison: a dynamic index would move the array to local memory.
    __device__ __forceinline__ Reals bias_of(int section) const {
        return section == 0 ? biases[0] : section == 1 ? biases[1] : biases[2];
    }
    __device__ __forceinline__ int first_head(int section) const {
        return section == 0 ? 0 : n_heads + (section - 1) * kv_heads;
    }
};

// Destination and rotation of a pair (i, i + d / 2) of a head.
template <typename T> struct RopeKvStore {
    QkvSections s;
    T *q;
    int64_t q_row;
    T *k_cache, *v_cache;

    // Address of the first value of a pair; null: padding row. slot: KV slot of the row.
    __device__ __forceinline__ T *destination(int head, int pair, int row, int64_t slot) const {
        const int section = s.section_of(head);
        const int own = head - s.first_head(section);
        if (section == 0) {
            return q + row * q_row + own * s.d + pair;
        }
        if (slot < 0 || slot >= s.n_slots) {
            return nullptr;
        }
        return (section == 1 ? k_cache : v_cache) + (slot * s.kv_heads + own) * s.d + pair;
    }
    __device__ __forceinline__ uint32_t bias_bits(int head, int i) const {
        const int section = s.section_of(head);
        const Reals bias = s.bias_of(section);
        return bias.data != nullptr ? bias.load_bits((head - s.first_head(section)) * s.d + i) : 0;
    }
    __device__ __forceinline__ void sincos(int pair, int row, float *sin, float *cos) const {
        rope_sincos(s.positions[row], s.inv_freq[pair], sin, cos);
    }
    // RoPE for queries and keys; values are unchanged.
    __device__ __forceinline__ void rotate(int head, float sin, float cos, float *low,
                                           float *high) const {
        if (s.section_of(head) < 2) {
            const float rotated = *low * cos - *high * sin;
            *high = *high * cos + *low * sin;
            *low = rotated;
        }
    }
};

// Epilogue of the q, k and v GEMM: bias, RoPE, KV store. A unit has rows of the first half of a
// head and the matching rows of the second half.
template <typename T> struct QkvEpilogue {
    struct Operands {
        uint32_t low, high; // bias bits
        float frequency;
        int32_t slot;
        int64_t position;
    };
    struct Prepared {
        float low, high, sin, cos;
        int32_t slot;
    };

    RopeKvStore<T> pairs;
    const T *w[3]; // [heads * d, k] each
    int64_t k;
    int items;

    // Empty unless the three weights are adjacent.
    AtomLayout<T> atoms() const {
        const QkvSections &s = pairs.s;
        const bool are_one = w[1] == w[0] + int64_t(s.n_heads) * s.d * k &&
                             w[2] == w[1] + int64_t(s.kv_heads) * s.d * k && s.d % 16 == 0;
        const int64_t atoms_per_head = s.d / 16;
        return {w[0],    s.d / 2 * k,    8 * k,
                s.d * k, atoms_per_head, are_one ? s.heads() * atoms_per_head : 0};
    }
    // Of adjacent weights.
    AtomRows atom_rows() const {
        const int64_t d = pairs.s.d;
        return {d / 2, 8, d, d / 16, d % 16 == 0 ? pairs.s.heads() * (d / 16) : 0};
    }
    __host__ __device__ int64_t count() const { return int64_t(pairs.s.heads()) * (pairs.s.d / 2); }
    __device__ __forceinline__ const T *row(int unit, int group, int i) const {
        const int half = pairs.s.d / 2;
        const int at = unit * items + i;
        const int head = at / half;
        if (i >= items || head >= pairs.s.heads()) {
            return nullptr;
        }
        const int section = pairs.s.section_of(head);
        const int row = (head - pairs.s.first_head(section)) * pairs.s.d + group * half + at % half;
        const T *weights = section == 0 ? w[0] : (section == 1 ? w[1] : w[2]);
        return weights + int64_t(row) * k;
    }
    __device__ __forceinline__ int64_t row_index(int unit, int group, int i) const {
        const int half = pairs.s.d / 2;
        const int at = unit * items + i;
        const int head = at / half;
        return i < items && head < pairs.s.heads()
                   ? int64_t(head) * pairs.s.d + group * half + at % half
                   : -1;
    }
    __device__ __forceinline__ Operands load_weights(int unit, int i) const {
        const int half = pairs.s.d / 2;
        const int at = unit * items + i;
        const int head = at / half;
        const int pair = at % half;
        Operands operands{};
        if (i < items && head < pairs.s.heads()) {
            operands.low = pairs.bias_bits(head, pair);
            operands.high = pairs.bias_bits(head, pair + half);
            operands.frequency = pairs.s.inv_freq[pair];
        }
        return operands;
    }
    __device__ __forceinline__ void load_rows(int, int, int row, Operands *operands) const {
        operands->position = pairs.s.positions[row];
        operands->slot = pairs.s.slots[row];
    }
    __device__ __forceinline__ Prepared prepare(int unit, int i, const Operands &operands) const {
        const int head = (unit * items + i) / (pairs.s.d / 2);
        const Reals bias = pairs.s.bias_of(pairs.s.section_of(head));
        Prepared prepared{bias.value_of(operands.low), bias.value_of(operands.high), 0, 0,
                          operands.slot};
        rope_sincos(operands.position, operands.frequency, &prepared.sin, &prepared.cos);
        return prepared;
    }
    __device__ __forceinline__ void store(int unit, int i, int row, float low, float high,
                                          const Prepared &prepared) const {
        const int half = pairs.s.d / 2;
        const int at = unit * items + i;
        const int head = at / half;
        if (i >= items || head >= pairs.s.heads()) {
            return;
        }
        T *to = pairs.destination(head, at % half, row, prepared.slot);
        if (to == nullptr) {
            return;
        }
        low += prepared.low;
        high += prepared.high;
        pairs.rotate(head, prepared.sin, prepared.cos, &low, &high);
        to[0] = from_float<T>(low);
        to[half] = from_float<T>(high);
    }
};

// Epilogue of the gate and up GEMM: SwiGLU.
template <typename T> struct SwigluEpilogue {
    using Operands = NoOperands;
    using Prepared = NoOperands;

    const T *gate, *up; // [n, k] each
    int64_t n, k;
    T *out;
    int64_t ldo;
    int items;

    AtomLayout<T> atoms() const {
        return {gate, up - gate, 8 * k, 8 * k, n / 8, n % 8 == 0 ? n / 8 : 0};
    }
    AtomRows atom_rows() const { return {n, 8, 8, n / 8, n % 8 == 0 ? n / 8 : 0}; }
    __host__ __device__ int64_t count() const { return n; }
    __device__ __forceinline__ const T *row(int unit, int group, int i) const {
        const int64_t at = int64_t(unit) * items + i;
        return i < items && at < n ? (group == 0 ? gate : up) + at * k : nullptr;
    }
    __device__ __forceinline__ int64_t row_index(int unit, int group, int i) const {
        const int64_t at = int64_t(unit) * items + i;
        return i < items && at < n ? group * n + at : -1;
    }
    __device__ __forceinline__ Operands load_weights(int, int) const { return {}; }
    __device__ __forceinline__ void load_rows(int, int, int, Operands *) const {}
    __device__ __forceinline__ Prepared prepare(int, int, Operands) const { return {}; }
    __device__ __forceinline__ void store(int unit, int i, int row, float low, float high,
                                          Prepared) const {
        const int64_t at = int64_t(unit) * items + i;
        if (i < items && at < n) {
            out[row * ldo + at] = from_float<T>(high * low / (1.0f + expf(-low)));
        }
    }
};

} // namespace llaisys::ops::cuda
