// What becomes of the products of a decoder layer with few rows (ops/cuda/few_rows_types.cuh), and of
// pairs of queries and keys after any product.
#pragma once

#include "ops/cuda/few_rows_types.cuh"

namespace llaisys::ops::cuda {

// The q, k and v sections one behind the other, in heads.
struct Sections {
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
    // Chosen by comparing: an index that is not known would put all three into local memory.
    __device__ __forceinline__ Reals bias_of(int section) const {
        return section == 0 ? biases[0] : section == 1 ? biases[1] : biases[2];
    }
    __device__ __forceinline__ int first_head(int section) const {
        return section == 0 ? 0 : n_heads + (section - 1) * kv_heads;
    }
};

// Where pairs (i, i + d/2) of a head belong, and what is done to them on the way.
template <typename T> struct PairStore {
    Sections s;
    T *q;
    int64_t q_row;
    T *k_cache, *v_cache;

    // The first value of a pair; null: a row that only fills the graph up. slot: of the row.
    __device__ __forceinline__ T *place(int head, int pair, int row, int64_t slot) const {
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
    __device__ __forceinline__ void angle(int pair, int row, float *sin, float *cos) const {
        turn_of(s.positions[row], s.inv_freq[pair], sin, cos);
    }
    // Queries and keys are turned, values are not.
    __device__ __forceinline__ void turn(int head, float sin, float cos, float *low,
                                         float *high) const {
        if (s.section_of(head) < 2) {
            const float turned = *low * cos - *high * sin;
            *high = *high * cos + *low * sin;
            *low = turned;
        }
    }
};

// Pairs of heads: a row of the first half and one of the second.
template <typename T> struct QkvUse {
    struct Held {
        uint32_t low, high; // biases
        float frequency;
        int32_t slot;
        int64_t position;
    };
    struct Ready {
        float low, high, sin, cos;
        int32_t slot;
    };

    PairStore<T> pairs;
    const T *w[3]; // [heads * d, k] each
    int64_t k;
    int items;

    // None where the three do not lie one behind the other.
    AtomPlaces<T> atoms() const {
        const Sections &s = pairs.s;
        const bool are_one = w[1] == w[0] + int64_t(s.n_heads) * s.d * k &&
                             w[2] == w[1] + int64_t(s.kv_heads) * s.d * k && s.d % 16 == 0;
        const int64_t a_head = s.d / 16;
        return {w[0], s.d / 2 * k, 8 * k, s.d * k, a_head, are_one ? s.heads() * a_head : 0};
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
    __device__ __forceinline__ Held hold_weights(int unit, int i) const {
        const int half = pairs.s.d / 2;
        const int at = unit * items + i;
        const int head = at / half;
        const int pair = at % half;
        Held held{};
        if (i < items && head < pairs.s.heads()) {
            held.low = pairs.bias_bits(head, pair);
            held.high = pairs.bias_bits(head, pair + half);
            held.frequency = pairs.s.inv_freq[pair];
        }
        return held;
    }
    __device__ __forceinline__ void hold_rows(int, int, int row, Held *held) const {
        held->position = pairs.s.positions[row];
        held->slot = pairs.s.slots[row];
    }
    __device__ __forceinline__ Ready ready(int unit, int i, const Held &held) const {
        const int head = (unit * items + i) / (pairs.s.d / 2);
        const Reals bias = pairs.s.bias_of(pairs.s.section_of(head));
        Ready made{bias.value_of(held.low), bias.value_of(held.high), 0, 0, held.slot};
        turn_of(held.position, held.frequency, &made.sin, &made.cos);
        return made;
    }
    __device__ __forceinline__ void store(int unit, int i, int row, float low, float high,
                                          const Ready &ready) const {
        const int half = pairs.s.d / 2;
        const int at = unit * items + i;
        const int head = at / half;
        if (i >= items || head >= pairs.s.heads()) {
            return;
        }
        T *to = pairs.place(head, at % half, row, ready.slot);
        if (to == nullptr) {
            return;
        }
        low += ready.low;
        high += ready.high;
        pairs.turn(head, ready.sin, ready.cos, &low, &high);
        to[0] = from_float<T>(low);
        to[half] = from_float<T>(high);
    }
};

// Outputs of gate and the same of up.
template <typename T> struct SwigluUse {
    using Held = NothingHeld;
    using Ready = NothingHeld;

    const T *gate, *up; // [n, k] each
    int64_t n, k;
    T *out;
    int64_t ldo;
    int items;

    AtomPlaces<T> atoms() const {
        return {gate, up - gate, 8 * k, 8 * k, n / 8, n % 8 == 0 ? n / 8 : 0};
    }
    __host__ __device__ int64_t count() const { return n; }
    __device__ __forceinline__ const T *row(int unit, int group, int i) const {
        const int64_t at = int64_t(unit) * items + i;
        return i < items && at < n ? (group == 0 ? gate : up) + at * k : nullptr;
    }
    __device__ __forceinline__ Held hold_weights(int, int) const { return {}; }
    __device__ __forceinline__ void hold_rows(int, int, int, Held *) const {}
    __device__ __forceinline__ Ready ready(int, int, Held) const { return {}; }
    __device__ __forceinline__ void store(int unit, int i, int row, float low, float high,
                                          Ready) const {
        const int64_t at = int64_t(unit) * items + i;
        if (i < items && at < n) {
            out[row * ldo + at] = from_float<T>(high * low / (1.0f + expf(-low)));
        }
    }
};

} // namespace llaisys::ops::cuda
