// Inner loops of the CPU operators, one function table per instruction set. Operators check their
// arguments, divide the work into chunks and call these; kernels take plain pointers.
//
// Kernels read real values as f32: f16 and bf16 rows are widened in small pieces (rows.hpp), except
// where conversion dominates the cost (weights, KV cache).
#pragma once

#include "base/dtype.hpp"
#include "device/cpu/isa.hpp"

#include <cstdint>

namespace llaisys::ops::cpu {

// A packed weight is panels [ceil(out / 32)][in][32]: the 32 outputs of a panel are adjacent for
// each k, so that one output is one lane and sums along k in order. In bf16 outputs j and j + 16
// are adjacent (at 2j and 2j + 1), which makes widening two instructions. Outputs past the last one
// are zero.
constexpr int64_t kPanel = 32;
constexpr int64_t kLinearRows = 240; // largest number of rows of a LinearTask

// Index of column j within a row of a panel.
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

// m rows of one LoRA adapter. Shrink: t[i, r] = scale * sum over n values of x[rows[i]] * w[r].
// Expand: out[rows[i], j] += sum over r of t[i, r] * w[r, j], for n values of j.
struct LoraTask {
    int64_t m;
    int64_t rank;
    int64_t n;
    const int32_t *rows; // [m]
    const void *w;       // [rank, n], rows ldw apart, in the dtype of the kernel
    int64_t ldw;
    float *t; // [m, rank], rows ldt apart
    int64_t ldt;
    const float *x; // shrink: rows ldx apart
    int64_t ldx;
    float scale; // shrink
    float *out;  // expand: rows ldo apart
    int64_t ldo;
};

// Attention processes the entries of a span of kSpan entries in order, in tiles of kTile entries,
// then merges the spans in order; both are aligned to multiples from entry 0. The order is the same
// for every batch.
constexpr int64_t kTile = 64;
constexpr int64_t kSpan = 256;

// Partial attention result of the rows of one KV head: softmax(scores) * v = o / l, with weights
// relative to exp(m). m = -inf, l = 0, o = 0: no entry yet.
struct AttentionState {
    float *m; // [rows rounded up to 16]; 16 more floats can be read
    float *l; // [rows]
    float *o; // [rows, ldo], ldo a multiple of kPanel

    // State of another head, at an offset in floats.
    AttentionState after(int64_t floats) const { return {m + floats, l + floats, o + floats}; }
};

// Stride of query rows with the fastest code; wider heads use other strides.
constexpr int64_t kQueryStride = 144;

// The first entries of another task, in the same cache.
struct AttentionStart {
    const int32_t *table; // block table of the sequence; null: there is none
    int64_t begin;        // entries [begin, end)
    int64_t end;
    const void *k_cache;
    const void *v_cache;
};

// Query tokens of one sequence and the query heads that share one KV head: row t * group + g.
// Several adjacent KV heads may be processed together.
struct AttentionTask {
    const float
        *q; // [n_heads, n_tokens * group, ldq], already scaled (and prepared: ByteAttention)
    int64_t ldq;
    int64_t n_heads; // KV heads
    int64_t n_tokens;
    int64_t group;
    int64_t d;
    int64_t value_dim;    // at most d
    int64_t ldo;          // value_dim rounded up to whole panels
    int64_t head_stride;  // cache elements from one KV head to the next
    int64_t state_stride; // floats from the state of one head to the next
    const int32_t *begin; // [n_tokens]: range of visible entries
    const int32_t *end;   // [n_tokens]
    const void *k_cache;  // first KV head of slot 0; slots are slot_stride elements apart
    const void *v_cache;  // the keys themselves if they contain the values
    DType k_dtype; // i8: each head's d bytes are followed by their scale; v_dtype is i8 as well
    DType v_dtype;
    int64_t slot_stride;
    const int32_t *table; // block table of the sequence
    int64_t limit;        // entries from here on must not be read
    int64_t block_size;
    float soft_cap;      // scores become soft_cap * tanh(score / soft_cap); 0: none
    float *scratch;      // attention_scratch() floats, of this thread
    AttentionStart next; // of the task that probably follows on this thread: prefetched
};

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

constexpr int64_t kMaxRowTile = 32; // largest height of a row tile on any instruction set

// Scratch of one attention kernel call, in floats; rows over all heads.
constexpr int64_t attention_key_floats(int64_t d) { return kTile * (d < 5 ? 5 : d); }
constexpr int64_t attention_scratch(int64_t rows, int64_t d) {
    return attention_key_floats(d) + kTile * round_up(d, kPanel) + kMaxRowTile * kTile + 2 * kTile +
           rows * 16;
}

// Throws for a dtype without a kernel. Not inline: a file of an instruction set must not hold shared
// functions.
[[noreturn]] void no_rows(DType dtype);

// One kernel per dtype of its weights.
template <typename Task> struct RealKernels {
    void (*f32)(const Task &task);
    void (*f16)(const Task &task);
    void (*bf16)(const Task &task);

    void run(DType dtype, const Task &task) const {
        switch (dtype) {
        case LLAISYS_DTYPE_F32:
            return f32(task);
        case LLAISYS_DTYPE_F16:
            return f16(task);
        case LLAISYS_DTYPE_BF16:
            return bf16(task);
        default:
            no_rows(dtype);
        }
    }
};

struct Kernels {
    device::Isa isa;

    // Conversion of n values.
    void (*widen_f16)(float *out, const f16_t *in, int64_t n);
    void (*widen_bf16)(float *out, const bf16_t *in, int64_t n);
    void (*narrow_f16)(f16_t *out, const float *in, int64_t n);
    void (*narrow_bf16)(bf16_t *out, const float *in, int64_t n);

    // A row of an 8-bit KV cache (ops/kv_layer.hpp): quantise, returning the scale; dequantise.
    float (*quantise)(int8_t *out, const float *in, int64_t n);
    void (*dequantise)(float *out, const int8_t *in, float scale, int64_t n);

    // Elementwise over n values; out may be an input.
    void (*add)(float *out, const float *a, const float *b, int64_t n);
    void (*swiglu)(float *out, const float *gate, const float *up, int64_t n);
    // gelu(gate), tanh approximation, times up; up null: 1.
    void (*geglu)(float *out, const float *gate, const float *up, int64_t n);
    // The same with erf.
    void (*geglu_erf)(float *out, const float *gate, const float *up, int64_t n);
    // out = in * factor * weight
    void (*scale)(float *out, const float *in, float factor, const float *weight, int64_t n);
    void (*scale_in_place)(float *x, float factor, int64_t n);
    // x = cap * tanh(x / cap)
    void (*soft_cap)(float *x, float cap, int64_t n);

    // Reductions over n values, in one fixed order.
    float (*sum_squares)(const float *x, int64_t n);
    float (*max)(const float *x, int64_t n); // ignores NaN; -inf without values
    // First index with x == value or x > value; n if none.
    int64_t (*find_equal)(const float *x, float value, int64_t n);
    int64_t (*find_greater)(const float *x, float value, int64_t n);

    // Cosine and sine of position * inv_freq[i], both rounded once from double.
    void (*angles)(float *cos, float *sin, int64_t position, const float *inv_freq, int64_t n);
    // (out_low, out_high) = (low, high) rotated by the angles; out may be in.
    void (*rotate)(float *out_low, float *out_high, const float *low, const float *high,
                   const float *cos, const float *sin, int64_t n);

    RealKernels<LinearTask> linear;
    RealKernels<LoraTask> lora_shrink;
    RealKernels<LoraTask> lora_expand;

    // Tiles of the entries [first, last), which lie in one span: overwrites the states of all
    // heads; `state` is that of the first.
    void (*attention_span)(const AttentionTask &task, const AttentionState &state, int64_t first,
                           int64_t last);
    // Merges `part`, the state of the entries after those of `total`.
    void (*attention_merge)(const AttentionState &total, const AttentionState &part, int64_t rows,
                            int64_t ldo);
};

// The table of device::cpu_isa().
const Kernels &kernels();

// The table of one instruction set; null when the build or the machine lacks it.
const Kernels *kernels_of(device::Isa isa);

// For tests: makes kernels() return the table of `isa`; false if there is none. Must not be called
// while an operator runs.
bool use_kernels_of(device::Isa isa);

} // namespace llaisys::ops::cpu
