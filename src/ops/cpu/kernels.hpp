// The inner loops of the CPU operators, one table of functions per instruction set. Operators check
// their arguments, cut the work into chunks and call these; a kernel knows plain pointers only.
//
// Real values reach the kernels as f32: rows in f16 or bf16 are widened piece by piece (rows.hpp),
// except where the dtype is what the time goes into (weights, KV cache).
#pragma once

#include "base/dtype.hpp"
#include "device/cpu/isa.hpp"

#include <cstdint>

namespace llaisys::ops::cpu {

// A packed weight is panels [ceil(out / 32)][in][32]: the 32 outputs of a panel lie side by side
// for each k, so that one output is one lane and sums strictly along k. In bf16 the outputs j and
// j + 16 are neighbours (at 2j and 2j + 1), which makes widening two instructions. Outputs past the
// last one are zero.
constexpr int64_t kPanel = 32;
constexpr int64_t kLinearRows = 240; // rows of one LinearTask at most

// Where column j of a panel lies in a row of it.
inline int64_t panel_index(DType dtype, int64_t j) {
    return dtype == LLAISYS_DTYPE_BF16 ? (j < 16 ? 2 * j : 2 * (j - 16) + 1) : j;
}

// out[i, j] = sum over k of x[i, k] * w[j, k] + bias[j], for whole panels.
struct LinearTask {
    const float *x; // [m, k], rows ldx apart
    int64_t ldx;
    int64_t m; // at most kLinearRows
    int64_t k;
    const void *w;    // [ceil(n / 32)][k][32], in the dtype of the kernel
    int64_t n;        // outputs
    const void *bias; // [n] or null
    DType bias_dtype;
    void *out; // [m, n], rows ldo apart
    DType out_dtype;
    int64_t ldo;
};

// Attention takes the entries of a span of kSpan entries in order, tiles of kTile entries by tiles,
// then merges the spans in order; both are aligned at multiples from entry 0. Whoever computes a
// token, alone or among others, does exactly this.
constexpr int64_t kTile = 64;
constexpr int64_t kSpan = 512;

// The partial result of the rows of one KV head: softmax(scores) * v = o / l, where weights were
// taken relative to exp(m). m = -inf, l = 0, o = 0: nothing seen yet.
struct AttentionState {
    float *m; // [rows rounded up to 16]
    float *l; // [rows]
    float *o; // [rows, ldo], ldo a multiple of kPanel

    // That of another head, `floats` further on.
    AttentionState after(int64_t floats) const { return {m + floats, l + floats, o + floats}; }
};

// Query rows so far apart are multiplied fastest; wider heads take any other distance.
constexpr int64_t kQueryStride = 144;

// Query tokens of one list and the query heads that share one KV head: row t * group + g. Several
// neighbouring KV heads may be taken together: they lie side by side in the cache.
struct AttentionTask {
    const float
        *q; // [n_heads, n_tokens * group, ldq], already scaled (and prepared: ByteAttention)
    int64_t ldq;
    int64_t n_heads; // KV heads
    int64_t n_tokens;
    int64_t group;
    int64_t d;
    int64_t ldo;          // d rounded up to whole panels
    int64_t head_stride;  // elements of the cache from one KV head to the next
    int64_t state_stride; // floats from the state of one head to that of the next
    const int32_t *begin; // [n_tokens]: entries seen
    const int32_t *end;   // [n_tokens]
    const void *k_cache;  // the first KV head of slot 0; slots are slot_stride elements apart
    const void *v_cache;
    DType k_dtype; // i8: each head's d bytes are followed by their scale; v_dtype is i8 as well
    DType v_dtype;
    int64_t slot_stride;
    const int32_t *table; // blocks of the list
    int64_t limit;        // entries from here on are not to be touched
    int64_t block_size;
    float *scratch; // attention_scratch() floats, of this thread
};

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

constexpr int64_t kMaxRowTile = 16; // rows of a register tile at most, on any instruction set

// Scratch of one attention kernel call, in floats; rows over all heads.
constexpr int64_t attention_key_floats(int64_t d) { return kTile * (d < 5 ? 5 : d); }
constexpr int64_t attention_scratch(int64_t rows, int64_t d) {
    return attention_key_floats(d) + kTile * round_up(d, kPanel) + kMaxRowTile * kTile + 2 * kTile +
           rows * 16;
}

struct Kernels {
    device::Isa isa;

    // Conversion of n values.
    void (*widen_f16)(float *out, const f16_t *in, int64_t n);
    void (*widen_bf16)(float *out, const bf16_t *in, int64_t n);
    void (*narrow_f16)(f16_t *out, const float *in, int64_t n);
    void (*narrow_bf16)(bf16_t *out, const float *in, int64_t n);

    // A row of a KV cache in eight bits (ops/kv_layer.hpp): returns its scale; the way back.
    float (*quantise)(int8_t *out, const float *in, int64_t n);
    void (*dequantise)(float *out, const int8_t *in, float scale, int64_t n);

    // Elementwise over n values; out may be an input.
    void (*add)(float *out, const float *a, const float *b, int64_t n);
    void (*swiglu)(float *out, const float *gate, const float *up, int64_t n);
    // out = in * factor * weight
    void (*scale)(float *out, const float *in, float factor, const float *weight, int64_t n);
    void (*scale_in_place)(float *x, float factor, int64_t n);

    // Reductions over n values, in one fixed order.
    float (*sum_squares)(const float *x, int64_t n);
    float (*max)(const float *x, int64_t n); // NaN is passed over; -inf when nothing is left
    // x = exp(x - max); returns the sum.
    float (*exp_sum)(float *x, float max, int64_t n);
    // The first index with x == value or x > value; n when there is none.
    int64_t (*find_equal)(const float *x, float value, int64_t n);
    int64_t (*find_greater)(const float *x, float value, int64_t n);

    // Cosine and sine of position * inv_freq[i], both rounded once from double.
    void (*angles)(float *cos, float *sin, int64_t position, const float *inv_freq, int64_t n);
    // (out_low, out_high) = (low, high) rotated by the angles; out may be in.
    void (*rotate)(float *out_low, float *out_high, const float *low, const float *high,
                   const float *cos, const float *sin, int64_t n);

    void (*linear_f32)(const LinearTask &task);
    void (*linear_f16)(const LinearTask &task);
    void (*linear_bf16)(const LinearTask &task);

    // The tiles of entries [first, last), which lie inside one span: writes the states of all heads
    // anew; `state` is that of the first.
    void (*attention_span)(const AttentionTask &task, const AttentionState &state, int64_t first,
                           int64_t last);
    // Adds `part`, the state of the entries after those of `total`.
    void (*attention_merge)(const AttentionState &total, const AttentionState &part, int64_t rows,
                            int64_t ldo);
};

// The table of this process: that of device::cpu_isa().
const Kernels &kernels();

// For kernels that meet a dtype they have no code for; here, because a file of an instruction set must
// not hold functions that others share.
[[noreturn]] void no_rows(DType dtype);

// The table of one instruction set, null when this build or this machine has it not.
const Kernels *kernels_of(device::Isa isa);

// For tests: makes kernels() return the table of `isa` from now on; false when there is none.
// Not to be called while an operator runs.
bool use_kernels_of(device::Isa isa);

} // namespace llaisys::ops::cpu
