// Fused steps of a decoder layer, by number of rows, with 16-bit weights:
//
//   up to 16   gemm_small_m.cuh: RMS norm in the prologue, SwiGLU or RoPE + KV store in the epilogue;
//              as below where it cannot fuse the norm (hidden sizes above 4,096, more than one row)
//   up to 96   norm kernel, then gemm_tma_m96.cuh with the same epilogues, where it is the fastest
//   up to 256  as below, with gemm_swiglu_m256.cuh for gate and up on compute capability 9.0
//   more       norm kernel, one cuBLASLt GEMM over adjacent weights, then a kernel for biases, RoPE and
//              KV store; swiglu_rows.cuh, or gemm_swiglu_sm90.cuh with enough rows to fill its tiles
// With LoRA adapters the norm is a kernel of its own and the products are stored: ops/lora adds to
// them before biases, RoPE and KV store, or with SwiGLU.
//
// With quantised weights: up to 96 rows quant_gemm.cuh with the same epilogues; above, a norm kernel,
// linear, and a kernel for the rest while linear reads the weights as they are (ops/linear), where the
// norm kernel of f8 weights quantises its rows; otherwise they are converted to 16 bits first.
//
// Bound: weight reads up to 64 rows, L2 to SM bandwidth above.
#include "ops/decoder_layer/cuda.hpp"

#include "ops/cuda/dispatch.cuh"
#include "ops/cuda/gemm_swiglu_m256_config.cuh"
#include "ops/cuda/gemm_swiglu_sm90.cuh"
#include "ops/cuda/rms_norm_rows.cuh"
#include "ops/decoder_layer/cuda_lora_rope.cuh"
#include "ops/decoder_layer/cuda_products.cuh"
#include "ops/decoder_layer/cuda_rope_kv_store.cuh"

namespace llaisys::ops {

namespace {

// Whether the columns of b follow those of a.
bool is_adjacent(const Tensor &a, const Tensor &b) {
    return b.data() == a.data() + bytes_of(a.dtype(), a.size(1)) && a.stride(0) == b.stride(0);
}

// norm.normed = the normalized rows before products with LoRA adapters. True: with t of the products
// in adapters.scratch, and the pending products are added.
bool normalize_lora(const device::Stream &stream, Residual *residual, const Norm &norm,
                    const Lora &adapters) {
    const Tensor &sum = residual->sum;
    const DType dtype = norm.normed.dtype();
    if (residual->addend.defined() || residual->lora.rows != adapters.rows) {
        settle(stream, residual);
    }
    if (!can_fuse_lora(stream, *adapters.weights[0], dtype, sum.size(1)) ||
        (norm.weight.dtype() != LLAISYS_DTYPE_F32 && norm.weight.dtype() != dtype) ||
        !is_16_byte_aligned(norm.weight) || norm.normed.stride(0) % 8 != 0) {
        rms_norm(stream, norm.normed, settle(stream, residual), norm.weight, norm.epsilon);
        return false;
    }
    lora_norm_cuda(stream, {sum, norm.weight, norm.normed, norm.epsilon}, residual->lora,
                   adapters.weights, adapters.n_parts, *adapters.rows, *adapters.scratch);
    residual->lora = {};
    return true;
}

template <typename T>
void attention_input(const device::Stream &stream, Residual *stream_rows, const Norm &norm,
                     const LinearPart &q, const LinearPart &k, const LinearPart &v,
                     const HeadNorms &head_norms, const Placement &placement,
                     const Lora &adapters) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const KvLayer &kv = placement.kv;
    const bool has_lora = adapters.rows != nullptr;
    const bool has_terms = has_lora && normalize_lora(stream, stream_rows, norm, adapters);
    const Tensor &residual = settle(stream, stream_rows);
    const int64_t n = residual.size(0);
    cuda::RopeKvStore<T> pairs{};
    pairs.s = {int(q.out->size(1) / kv.head_dim),
               int(kv.n_heads),
               int(kv.head_dim),
               {cuda::reals(q.bias), cuda::reals(k.bias), cuda::reals(v.bias)},
               placement.positions.as<int64_t>(),
               placement.inv_freq.as<float>(),
               placement.slots.as<int32_t>(),
               kv.n_slots};
    pairs.q = reinterpret_cast<T *>(q.out->data());
    pairs.q_row = q.out->stride(0);
    pairs.k_cache = reinterpret_cast<T *>(kv.k.data());
    pairs.v_cache = reinterpret_cast<T *>(kv.v.data());
    const auto weights = [](const LinearPart &part) {
        return reinterpret_cast<const T *>(part.weight->bytes.data());
    };
    const cuda::QkNorm qk_norm{cuda::reals(head_norms.q), cuda::reals(head_norms.k), norm.epsilon};
    const bool is_bytes = is_eight_bits(kv.k.dtype());
    const cuda::M96Tuning tuning = cuda::m96_qkv_tuning(n, residual.size(1));
    bool is_projected = false;
    if (head_norms.q != nullptr || is_bytes || has_lora) {
        is_projected = project<T>(stream, residual, norm, {&q, &k, &v}, tuning, has_lora);
    } else {
        const cuda::QkvEpilogue<T> epilogue{
            pairs, {weights(q), weights(k), weights(v)}, residual.size(1), 0};
        if (has_blocks(q) || has_blocks(k) || has_blocks(v)) {
            if (is_next_quantised(*q.weight, *k.weight) &&
                is_next_quantised(*k.weight, *v.weight)) {
                if (run_quantised<T>(stream, residual, norm, *q.weight, epilogue)) {
                    return;
                }
                is_projected = run_f8_norm(stream, residual, norm, *q.weight,
                                           epilogue.pairs.s.heads() * kv.head_dim, *q.out);
            }
        } else if (run_fused<T>(stream, residual, norm, epilogue, tuning)) {
            return;
        }
    }
    if (!is_projected) {
        const LinearPart parts[] = {
            {q.weight, nullptr, q.out}, {k.weight, nullptr, k.out}, {v.weight, nullptr, v.out}};
        if (!has_lora) {
            rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
        }
        linear(stream, norm.normed, parts, 3);
    }
    if (has_terms && head_norms.q == nullptr && !is_bytes && cuda::can_lora_rope(kv.head_dim)) {
        return cuda::lora_rope_kv_store<T>(cuda_stream, pairs, adapters.weights, *adapters.rows,
                                           *adapters.scratch, pairs.q, pairs.q_row);
    }
    if (has_terms) {
        const LoraPart parts[] = {{adapters.weights[0], q.out},
                                  {adapters.weights[1], k.out},
                                  {adapters.weights[2], v.out}};
        lora_expand_cuda(stream, parts, 3, *adapters.rows, *adapters.scratch, kLoraNormSplits);
    } else {
        apply_lora(stream, adapters, norm.normed, {q.out, k.out, v.out});
    }
    if (!is_bytes) {
        cuda::rope_kv_store<T>(cuda_stream, pairs, qk_norm, pairs.q, pairs.q_row, n);
        return;
    }
    const cuda::KvByteCaches caches{cuda::kv_bytes(kv.k), cuda::kv_bytes(kv.v)};
    const auto store = kv.k.dtype() == LLAISYS_DTYPE_I8 ? cuda::rope_kv_store<T, cuda::Int8>
                                                        : cuda::rope_kv_store<T, cuda::E4m3>;
    store(cuda_stream, pairs, qk_norm, pairs.q, pairs.q_row, n, caches);
}

// Norm kernel, then gemm_swiglu_m256.cuh or gemm_swiglu_sm90.cuh; false where neither is supported
// or the fastest.
template <typename T>
bool run_swiglu_gemm(const device::Stream &stream, const Tensor &residual, const Norm &norm,
                     const cuda::SwigluEpilogue<T> &epilogue) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const cuda::SwigluGemm<T> product{reinterpret_cast<const T *>(norm.normed.data()),
                                      epilogue.gate,
                                      epilogue.up,
                                      epilogue.out,
                                      norm.normed.stride(0),
                                      epilogue.ldo,
                                      int(residual.size(0)),
                                      int(epilogue.n),
                                      int(epilogue.k)};
    const bool is_m256 = cuda::can_gemm_swiglu_m256(cuda_stream, product);
    if (cuda_stream.is_exact ||
        !(is_m256 || cuda::prefers_gemm_swiglu_sm90(cuda_stream, product))) {
        return false;
    }
    rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
    if (is_m256) {
        cuda::run_gemm_swiglu_m256<T>(
            cuda_stream, product,
            cuda::swiglu_m256_units(cuda_stream, product.m, product.n, product.k));
    } else {
        cuda::run_gemm_swiglu_sm90<T>(cuda_stream, product);
    }
    return true;
}

// False: the caller composes the plain operators.
template <typename T>
bool mlp_input(const device::Stream &stream, const Tensor &residual, const Norm &norm,
               const LinearPart &gate, const LinearPart &up) {
    const cuda::SwigluEpilogue<T> epilogue{reinterpret_cast<const T *>(gate.weight->bytes.data()),
                                           reinterpret_cast<const T *>(up.weight->bytes.data()),
                                           gate.weight->out_features,
                                           residual.size(1),
                                           reinterpret_cast<T *>(gate.out->data()),
                                           gate.out->stride(0),
                                           0};
    if (has_blocks(gate)) {
        if (!is_next_quantised(*gate.weight, *up.weight)) {
            return false;
        }
        if (run_quantised<T>(stream, residual, norm, *gate.weight, epilogue)) {
            return true;
        }
        if (!is_adjacent(*gate.out, *up.out) ||
            !run_f8_norm(stream, residual, norm, *gate.weight, 2 * epilogue.n, *gate.out)) {
            return false;
        }
        swiglu(stream, *gate.out, *gate.out, *up.out);
        return true;
    }
    return run_fused<T>(stream, residual, norm, epilogue,
                        cuda::m96_gate_up_tuning(residual.size(0), epilogue.k)) ||
           run_swiglu_gemm<T>(stream, residual, norm, epilogue);
}

// Gate and up with LoRA adapters, whose products SwiGLU needs.
template <typename T>
void mlp_input_lora(const device::Stream &stream, Residual *residual, const Norm &norm,
                    const LinearPart &gate, const LinearPart &up, const Lora &adapters) {
    const bool has_terms = normalize_lora(stream, residual, norm, adapters);
    const Tensor &sum = residual->sum;
    if (!project<T>(stream, sum, norm, {&gate, &up},
                    cuda::m96_gate_up_tuning(sum.size(0), sum.size(1)), true)) {
        const LinearPart parts[] = {gate, up};
        linear(stream, norm.normed, parts, 2);
    }
    if (!has_terms) {
        apply_lora(stream, adapters, norm.normed, {gate.out, up.out});
        return swiglu(stream, *gate.out, *gate.out, *up.out);
    }
    const LoraPart parts[] = {{adapters.weights[0], gate.out}, {adapters.weights[1], up.out}};
    lora_swiglu_cuda(stream, parts, *adapters.rows, *adapters.scratch, adapters.next,
                     *adapters.terms, &residual->lora);
}

template <typename T>
void head(const device::Stream &stream, const Tensor &logits, const Tensor &residual,
          const Norm &norm, const LinearWeight &weight, const Tensor &rows) {
    device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const int64_t m = rows.size(0);
    const int64_t k = residual.size(1);
    const cuda::LinearEpilogue<T> epilogue = store_to<T>(logits, weight, weight.out_features);
    const bool is_quant = is_quantised(weight.dtype());
    const bool can_fuse =
        is_quant
            ? cuda::can_gemm_small_m_quant(cuda_stream, m, k) &&
                  cuda::quant_gemm_norms<T>(cuda_stream, quant_matrix_of(weight), m, k, epilogue)
            : cuda::can_fuse_norm(cuda_stream, m, k);
    if (m <= cuda::max_fused_rows(cuda_stream) && can_fuse) {
        const cuda::GemmInput in = residual_input(residual, norm, m, rows.as<int32_t>());
        if (is_quant) {
            cuda::quant_gemm<T>(cuda_stream, in, quant_matrix_of(weight), epilogue);
        } else {
            cuda::run_gemm_small_m<T>(cuda_stream, in, epilogue);
        }
        return;
    }
    cuda::rms_norm_rows<T>(cuda_stream, reinterpret_cast<T *>(norm.normed.data()),
                           norm.normed.stride(0), residual.as<float>(), residual.stride(0),
                           rows.as<int32_t>(), norm.weight.as<float>(), m, k, norm.epsilon);
    const LinearPart part{&weight, nullptr, &logits};
    linear(stream, norm.normed.slice(0, 0, m), &part, 1);
}

} // namespace

bool attention_input_cuda(const device::Stream &stream, Residual *stream_rows, const Norm &norm,
                          const LinearPart &q, const LinearPart &k, const LinearPart &v,
                          const HeadNorms &head_norms, const Placement &placement,
                          const Lora &adapters) {
    const Tensor &residual = stream_rows->sum;
    const DType dtype = operand_dtype(q, norm);
    const bool is_quant = has_blocks(q) || has_blocks(k) || has_blocks(v);
    if (is_quant && must_widen(stream, residual, norm, q)) {
        const LinearWeight *const weights[] = {q.weight, k.weight, v.weight};
        LinearWeight wide[3];
        if (!widen_quantised(stream, weights, 3, norm.normed.dtype(), wide)) {
            return false;
        }
        const WithoutPdl without_pdl(stream);
        return attention_input_cuda(stream, stream_rows, norm, {&wide[0], q.bias, q.out},
                                    {&wide[1], k.bias, k.out}, {&wide[2], v.bias, v.out},
                                    head_norms, placement, adapters);
    }
    const KvLayer &kv = placement.kv;
    const bool has_qk_norm = head_norms.q != nullptr || head_norms.k != nullptr;
    const bool is_bytes = is_eight_bits(kv.k.dtype());
    if ((is_bytes || has_qk_norm) && !cuda::can_reduce_head(kv.head_dim)) {
        return false;
    }
    if (has_qk_norm && (head_norms.q == nullptr || head_norms.k == nullptr ||
                        head_norms.q->size(0) != kv.head_dim ||
                        !is_16_byte_aligned(*head_norms.q) || !is_16_byte_aligned(*head_norms.k))) {
        return false;
    }
    const bool has_rope_kernel =
        has_qk_norm || is_bytes || is_quant || adapters.rows != nullptr ||
        residual.size(0) > cuda::max_fused_rows(device::cuda_stream_of(stream));
    for (const LinearPart *part : {&q, &k, &v}) {
        if (!is_fast(residual, norm, *part) || operand_dtype(*part, norm) != dtype ||
            (has_rope_kernel && part->bias != nullptr && !is_16_byte_aligned(*part->bias))) {
            return false;
        }
    }
    if (q.out->dtype() != dtype || (!is_bytes && kv.k.dtype() != dtype) ||
        placement.rope_factor != 1.0f || kv.head_dim != 2 * placement.inv_freq.size(0) ||
        kv.head_dim % 16 != 0 || kv.head_dim > 2 * cuda::kMaxPairs ||
        (has_rope_kernel && !(is_adjacent(*q.out, *k.out) && is_adjacent(*k.out, *v.out) &&
                              is_16_byte_aligned(*q.out) && q.out->stride(0) % 8 == 0 &&
                              is_16_byte_aligned(kv.k) && is_16_byte_aligned(kv.v)))) {
        return false;
    }
    if (residual.size(0) == 0) {
        return true;
    }
    cuda::dispatch_half(dtype, [&](auto type) {
        attention_input<decltype(type)>(stream, stream_rows, norm, q, k, v, head_norms, placement,
                                        adapters);
    });
    return true;
}

bool mlp_input_cuda(const device::Stream &stream, Residual *stream_rows, const Norm &norm,
                    const LinearPart &gate, const LinearPart &up, const Lora &adapters) {
    const Tensor &residual = stream_rows->sum;
    const DType dtype = operand_dtype(gate, norm);
    if ((has_blocks(gate) || has_blocks(up)) && must_widen(stream, residual, norm, gate)) {
        const LinearWeight *const weights[] = {gate.weight, up.weight};
        LinearWeight wide[2];
        if (!widen_quantised(stream, weights, 2, norm.normed.dtype(), wide)) {
            return false;
        }
        const WithoutPdl without_pdl(stream);
        return mlp_input_cuda(stream, stream_rows, norm, {&wide[0], gate.bias, gate.out},
                              {&wide[1], up.bias, up.out}, adapters);
    }
    if (!is_fast(residual, norm, gate) || !is_fast(residual, norm, up) ||
        operand_dtype(up, norm) != dtype || has_blocks(gate) != has_blocks(up) ||
        gate.out->dtype() != dtype || residual.size(0) == 0) {
        return false;
    }
    bool is_done = false;
    if (adapters.rows != nullptr) {
        if (!is_adjacent(*gate.out, *up.out) || gate.out->size(1) % 8 != 0 ||
            gate.out->stride(0) % 8 != 0 || !is_16_byte_aligned(*gate.out)) {
            return false;
        }
        cuda::dispatch_half(dtype, [&](auto type) {
            mlp_input_lora<decltype(type)>(stream, stream_rows, norm, gate, up, adapters);
        });
        return true;
    }
    cuda::dispatch_half(dtype, [&](auto type) {
        is_done = mlp_input<decltype(type)>(stream, settle(stream, stream_rows), norm, gate, up);
    });
    return is_done;
}

bool head_cuda(const device::Stream &stream, const Tensor &logits, const Tensor &residual,
               const Norm &norm, const LinearWeight &weight, const Tensor &rows) {
    const LinearPart part{&weight, nullptr, &logits};
    if (!is_fast(residual, norm, part) || rows.size(0) == 0 ||
        logits.dtype() != LLAISYS_DTYPE_F32 || norm.weight.dtype() != LLAISYS_DTYPE_F32 ||
        !is_16_byte_aligned(norm.weight) || norm.normed.stride(0) % 4 != 0) {
        return false;
    }
    cuda::dispatch_half(norm.normed.dtype(), [&](auto type) {
        head<decltype(type)>(stream, logits, residual, norm, weight, rows);
    });
    return true;
}

} // namespace llaisys::ops
