/* Operators on tensors of one device. All return LLAISYS_OK or an llaisysStatus_t; the error text
 * names operator, argument, value and expectation.
 *
 * stream NULL: the CPU with the calling thread only. "real" means f32, f16 or bf16; accumulation
 * is in f32. Tensors are contiguous; "strided" ones only in the last dimension. Outputs must not
 * overlap inputs unless stated. */
#ifndef LLAISYS_OPS_H
#define LLAISYS_OPS_H

#include "llaisys/runtime.h"
#include "llaisys/tensor.h"

/* out = a + b, elementwise; all real, one shape, any dtypes. out may be a or b. */
LLAISYS_API int32_t llaisysAdd(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t a,
                               llaisysTensor_t b);

/* Index (i64 [rows]) and value ([rows], dtype of values) of the largest of each row of values
 * [rows, n] (real), the lowest index on a tie. NaN is never chosen; a row of NaN gives 0. */
LLAISYS_API int32_t llaisysArgmax(llaisysStream_t stream, llaisysTensor_t max_index,
                                  llaisysTensor_t max_value, llaisysTensor_t values);

/* out[i] = table[index[i]]; index i64 [n] within the table, table [rows, d] real, out [n, d]
 * real. */
LLAISYS_API int32_t llaisysEmbedding(llaisysStream_t stream, llaisysTensor_t out,
                                     llaisysTensor_t index, llaisysTensor_t table);

/* A packed weight [out_features, in_features] (real or quantised). Copies the tensor, which may be
 * destroyed. */
typedef struct LlaisysLinearWeight *llaisysLinearWeight_t;
LLAISYS_API int32_t llaisysLinearWeightCreate(llaisysStream_t stream, llaisysTensor_t tensor,
                                              llaisysLinearWeight_t *weight);
LLAISYS_API void llaisysLinearWeightDestroy(llaisysLinearWeight_t weight);
/* Bytes of the packed weight on a device of this type; at most 1 % more than it takes. */
LLAISYS_API int32_t llaisysLinearWeightBytes(llaisysDeviceType_t device, llaisysDataType_t dtype,
                                             int64_t out_features, int64_t in_features,
                                             int64_t *bytes);

/* For each of n parts: out[p] = in[rows] * weight[p]^T + bias[p], in one parallel region.
 * in [m, in_features] real, strided; rows i32 [r] selects rows of in, NULL: all (r = m); out[p]
 * [r, out_features of p] real, strided; bias NULL or an array of n, entries NULL or
 * [out_features] real. Results are independent of other rows and of the number of threads. */
LLAISYS_API int32_t llaisysLinear(llaisysStream_t stream, llaisysTensor_t in, llaisysTensor_t rows,
                                  int32_t n, const llaisysLinearWeight_t *weight,
                                  const llaisysTensor_t *bias, const llaisysTensor_t *out);

/* Selects the experts of each token: experts i32 [n, k] and weights f32 [n, k], best first, lowest
 * index first on a tie, from logits f32 [n, E]. The scores are the softmax of a row, or the sigmoid
 * of each logit. bias f32 [E] (NULL: none) is added to the scores for the selection only. With
 * n_top_groups < n_groups, experts outside the best groups (equal ranges of experts; a group's score
 * is its best expert, or the sum of its two best with a bias) are not selected. The weights are the
 * scores of the selected experts, divided by their sum if is_renormalised, times scale. */
LLAISYS_API int32_t llaisysMoeRoute(llaisysStream_t stream, llaisysTensor_t experts,
                                    llaisysTensor_t weights, llaisysTensor_t logits,
                                    llaisysTensor_t bias, int32_t is_sigmoid,
                                    int32_t is_renormalised, int32_t n_groups, int32_t n_top_groups,
                                    float scale);

/* Mixture of experts: out[t] = sum over j of weights[t, j] * MLP of expert experts[t, j] of in[t], in
 * the order of j. in, out [n, hs] real strided; experts i32 [n, k] within n_experts; weights f32 [n,
 * k]; gate, up [n_experts * di, hs] and down [n_experts * hs, di], expert by expert, real or
 * quantised; biases [n_experts, di], [n_experts, di], [n_experts, hs] real, or NULL. The MLP is
 * down(up * silu(gate)). With limit > 0, gate is at most limit, up is within [-limit, limit], and the
 * MLP is down((up + 1) * gate * sigmoid(alpha * gate)).
 * Packs the weights for this call; a model packs them once. */
LLAISYS_API int32_t llaisysMoeMlp(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t in,
                                  llaisysTensor_t experts, llaisysTensor_t weights,
                                  llaisysTensor_t gate, llaisysTensor_t up, llaisysTensor_t down,
                                  llaisysTensor_t gate_bias, llaisysTensor_t up_bias,
                                  llaisysTensor_t down_bias, int32_t n_experts, float limit,
                                  float alpha);

/* out[i] = in[i] / rms(in[i]) * weight over the last dimension; in, out [n, d] real strided,
 * weight [d] real. out may be in. */
LLAISYS_API int32_t llaisysRmsNorm(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t in,
                                   llaisysTensor_t weight, float epsilon);

/* residual += in, then out = rms_norm(residual). out may be in. */
LLAISYS_API int32_t llaisysAddRmsNorm(llaisysStream_t stream, llaisysTensor_t out,
                                      llaisysTensor_t residual, llaisysTensor_t in,
                                      llaisysTensor_t weight, float epsilon);

/* Rotary position embedding, halves paired (i, i + d/2): out, in [n, heads, d] real strided,
 * positions i64 [n], inv_freq f32 [d/2]. A pair with frequency 0 is copied. out may be in. */
LLAISYS_API int32_t llaisysRope(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t in,
                                llaisysTensor_t positions, llaisysTensor_t inv_freq);

/* cache[slots[i]] = values[i]; cache [n_slots, heads, d], values [n, heads, d] strided, slots i32
 * [n] within the cache, distinct.
 * An 8-bit cache is i8, or f8_e4m3 on CUDA, [n_slots, heads, d + 4]: bytes and a scale per slot and
 * head, an f32 = (largest magnitude of the d values) / 127, or / 448. d is at most 1024. On the CPU
 * the scale follows its d bytes; on CUDA bytes [n_slots, heads, d] precede scales [heads, n_slots].
 */
LLAISYS_API int32_t llaisysKvStore(llaisysStream_t stream, llaisysTensor_t cache,
                                   llaisysTensor_t values, llaisysTensor_t slots);

/* Paged attention of query token i over the entries [begin[i], end[i]) of its list: entry e of
 * table row t is slot tables[t, e / block_size] * block_size + e % block_size. out, q [n, heads,
 * d] strided; k_cache, v_cache [n_slots, kv_heads, d], heads a multiple of kv_heads; q_rows,
 * begin, end i32 [n]; tables i32 [rows, width]. All real, or both caches of 8 bits as written
 * by llaisysKvStore; accumulation in f32; an empty list gives zeros. Tiles are aligned to entry
 * numbers, so that the result of a token depends only on its own list. v_cache NULL: the values are
 * the first dv of each key (latent attention), and out is [n, heads, dv]; not with 8 bits.
 * sinks f32 [heads]: exp(sink) is added to the denominator of the softmax of each head; NULL: none.
 * With soft_cap > 0 a score s becomes soft_cap * tanh(s / soft_cap).
 * runs i32 [n_runs, 2], not checked, ignored by a CPU: the first token and the length of each run of
 * adjacent tokens with one table row, from 2 to `longest` tokens; every token is in a run. NULL with
 * longest 1: every run has one token; with 0: unknown, a GPU searches for them. */
LLAISYS_API int32_t llaisysAttention(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t q,
                                     llaisysTensor_t k_cache, llaisysTensor_t v_cache,
                                     llaisysTensor_t q_rows, llaisysTensor_t begin,
                                     llaisysTensor_t end, llaisysTensor_t tables,
                                     llaisysTensor_t sinks, llaisysTensor_t runs, int64_t longest,
                                     int32_t block_size, float scale, float soft_cap);

/* Attention with an explicit mask: q [n, heads, d], k and v [m, kv_heads, d], mask u8 [n, m],
 * non-zero = visible; a token that sees nothing gives zeros. */
LLAISYS_API int32_t llaisysSelfAttentionMasked(llaisysStream_t stream, llaisysTensor_t out,
                                               llaisysTensor_t q, llaisysTensor_t k,
                                               llaisysTensor_t v, llaisysTensor_t mask,
                                               float scale);

/* Quantises a weight: in [n, k] real strided, out [n, k] q8_0, q4_0 or q4_1, k a multiple of 32, or
 * f8_g128 with one scale per row, k a multiple of 128. Rounds to nearest; 4-bit types choose the
 * scale with the least squared error among a few. A block with a value that is not finite or too
 * large for its f16 scale becomes NaN, with f8_g128 the whole row. */
LLAISYS_API int32_t llaisysQuantise(llaisysStream_t stream, llaisysTensor_t out,
                                    llaisysTensor_t in);

/* Copies values between layouts: same shape and dtype, any strides, any dtype. */
LLAISYS_API int32_t llaisysRearrange(llaisysStream_t stream, llaisysTensor_t out,
                                     llaisysTensor_t in);

/* out = up * gate / (1 + exp(-gate)); all [n, d] real strided. out may be gate or up. */
LLAISYS_API int32_t llaisysSwiGLU(llaisysStream_t stream, llaisysTensor_t out, llaisysTensor_t gate,
                                  llaisysTensor_t up);

/* The k largest of each row of values [rows, n] (f32) in descending order, lowest index first on
 * a tie: index i32 [rows, k], value f32 [rows, k]; 1 <= k <= n. NaN counts as -inf. */
LLAISYS_API int32_t llaisysTopK(llaisysStream_t stream, llaisysTensor_t index,
                                llaisysTensor_t value, llaisysTensor_t values);

#endif
