// Fused steps of a decoder layer, by number of rows, with 16-bit weights:
//
//   up to 16   gemm_small_m.cuh: RMS norm in the prologue, SwiGLU or RoPE + KV store in the epilogue;
//              a separate norm kernel where the GEMM cannot fuse it
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

#include "ops/cuda/dispatch_dtype.cuh"
#include "ops/cuda/gemm_small_m.cuh"
#include "ops/cuda/gemm_swiglu_m256_config.cuh"
#include "ops/cuda/gemm_swiglu_sm90.cuh"
#include "ops/cuda/gemm_tma_m96.cuh"
#include "ops/cuda/quant_gemm.cuh"
#include "ops/cuda/quant_weight.cuh"
#include "ops/cuda/rms_norm_rows.cuh"
#include "ops/decoder_layer/cuda_lora_rope.cuh"
#include "ops/decoder_layer/cuda_rope_kv_store.cuh"
#include "ops/rms_norm/op.hpp"
#include "ops/swiglu/op.hpp"

namespace llaisys::ops {

namespace {

bool is_16_byte_aligned(const Tensor &tensor) {
    return reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0;
}

// Whether the columns of b follow those of a.
bool is_adjacent(const Tensor &a, const Tensor &b) {
    return b.data() == a.data() + bytes_of(a.dtype(), a.size(1)) && a.stride(0) == b.stride(0);
}

bool is_bias_16_byte_aligned(const LinearPart &part) {
    return part.bias == nullptr || is_16_byte_aligned(*part.bias);
}

bool has_blocks(const LinearPart &part) { return is_quantised(part.weight->dtype()); }

// Dtype of the operands of a product: that of the activations when the weight is quantised.
DType operand_dtype(const LinearPart &part, const Norm &norm) {
    return has_blocks(part) ? norm.normed.dtype() : part.weight->bytes.dtype();
}

bool is_fast(const Tensor &residual, const Norm &norm, const LinearPart &part) {
    const DType dtype = operand_dtype(part, norm);
    return norm.kind == NormKind::rms && dtype != LLAISYS_DTYPE_F32 &&
           norm.normed.dtype() == dtype && residual.dtype() == LLAISYS_DTYPE_F32 &&
           residual.size(1) % 8 == 0 && residual.stride(0) % 4 == 0 &&
           is_16_byte_aligned(residual) && is_16_byte_aligned(norm.normed) &&
           is_16_byte_aligned(part.weight->bytes);
}

// Input of a small-M GEMM: residual rows for a fused norm, otherwise normalized rows. is_normed:
// norm.normed has them.
cuda::GemmInput gemm_input(const device::Stream &stream, const Tensor &residual, const Norm &norm,
                           bool is_normed = false) {
    cuda::GemmInput in{};
    in.m = int(residual.size(0));
    in.k = int(residual.size(1));
    if (!is_normed && cuda::can_fuse_norm(device::cuda_stream_of(stream), in.m, in.k) &&
        norm.weight.dtype() == LLAISYS_DTYPE_F32 && is_16_byte_aligned(norm.weight)) {
        in.residual = residual.as<float>();
        in.ld_residual = residual.stride(0);
        in.norm_weight = norm.weight.as<float>();
        in.epsilon = norm.epsilon;
    } else {
        if (!is_normed) {
            rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
        }
        in.x = norm.normed.data();
        in.ldx = norm.normed.stride(0);
    }
    return in;
}

cuda::GemmInput residual_input(const Tensor &residual, const Norm &norm) {
    cuda::GemmInput in{};
    in.m = int(residual.size(0));
    in.k = int(residual.size(1));
    in.residual = residual.as<float>();
    in.ld_residual = residual.stride(0);
    in.norm_weight = norm.weight.as<float>();
    in.epsilon = norm.epsilon;
    return in;
}

// One GEMM over adjacent quantised weights; false where it is not supported. The input is normalized
// by the GEMM, or by a kernel before it.
template <typename T, typename Epilogue>
bool run_quantised(const device::Stream &stream, const Tensor &residual, const Norm &norm,
                   const LinearWeight &first, const Epilogue &epilogue) {
    device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const cuda::QuantMatrix weights = quant_matrix_of(first);
    cuda::GemmInput in{};
    in.m = int(residual.size(0));
    in.k = int(residual.size(1));
    const bool uses_tma = cuda::uses_gemm_tma_quant<T>(cuda_stream, weights, in.m, in.k, epilogue);
    if (!uses_tma && in.m > cuda::max_fused_rows(cuda_stream)) {
        return false;
    }
    if (!uses_tma && !cuda::can_gemm_small_m_quant(cuda_stream, in.m, in.k)) {
        return false;
    }
    if (cuda::quant_gemm_norms<T>(cuda_stream, weights, in.m, in.k, epilogue) &&
        norm.weight.dtype() == LLAISYS_DTYPE_F32 && is_16_byte_aligned(norm.weight)) {
        in = residual_input(residual, norm);
    } else {
        rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
        in.x = norm.normed.data();
        in.ldx = norm.normed.stride(0);
    }
    cuda::quant_gemm<T>(cuda_stream, in, weights, epilogue);
    return true;
}

// Adjacent f8 weights with e4m3 rows of the normalized input; false where it is not supported.
bool run_f8_norm(const device::Stream &stream, const Tensor &residual, const Norm &norm,
                 const LinearWeight &first, int64_t n, const Tensor &out) {
    if (norm.weight.dtype() != LLAISYS_DTYPE_F32 || !is_16_byte_aligned(norm.weight)) {
        return false;
    }
    return multiply_f8_rows(stream, residual_input(residual, norm), norm.normed.dtype(), first, n,
                            out);
}

// Norm kernel, then gemm_tma_m96.cuh; false where it is not supported or not the fastest.
template <typename T, typename Epilogue>
bool run_m96(const device::Stream &stream, const Tensor &residual, const Norm &norm,
             const Epilogue &epilogue, const cuda::M96Tuning &tuning, bool is_normed = false) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    cuda::GemmInput in{};
    in.m = int(residual.size(0));
    in.k = int(residual.size(1));
    in.x = norm.normed.data();
    in.ldx = norm.normed.stride(0);
    if (cuda_stream.is_exact ||
        !cuda::can_gemm_tma_m96<T>(cuda_stream, in, epilogue.atoms(), tuning)) {
        return false;
    }
    if (!is_normed) {
        rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
    }
    cuda::run_gemm_tma_m96<T>(cuda_stream, in, epilogue, tuning);
    return true;
}

bool has_blocks(const LinearPart &q, const LinearPart &k, const LinearPart &v) {
    return has_blocks(q) || has_blocks(k) || has_blocks(v);
}

bool are_adjacent_quantised(const LinearPart &q, const LinearPart &k, const LinearPart &v) {
    return is_next_quantised(*q.weight, *k.weight) && is_next_quantised(*k.weight, *v.weight);
}

// GEMM of adjacent weights into adjacent outputs, without biases; false where cuBLASLt is to be
// used. is_normed: norm.normed has the normalized rows.
template <typename T>
bool project(const device::Stream &stream, const Tensor &residual, const Norm &norm,
             std::initializer_list<const LinearPart *> parts, const cuda::M96Tuning &tuning,
             bool is_normed) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const LinearPart &first = **parts.begin();
    for (const LinearPart *part : parts) {
        if (!has_blocks(*part)) {
            continue;
        }
        // Adjacent weights of one format; otherwise linear.
        int64_t n = 0;
        const LinearPart *before = nullptr;
        for (const LinearPart *each : parts) {
            if (is_normed ||
                (before != nullptr && !is_next_quantised(*before->weight, *each->weight))) {
                return false;
            }
            n += each->weight->out_features;
            before = each;
        }
        cuda::LinearEpilogue<T> sums{};
        sums.n = n;
        sums.k = residual.size(1);
        sums.bias = cuda::reals(nullptr);
        sums.out = cuda::reals(*first.out);
        sums.ldo = first.out->stride(0);
        return run_quantised<T>(stream, residual, norm, *first.weight, sums);
    }
    cuda::LinearEpilogue<T> epilogue{};
    for (const LinearPart *part : parts) {
        if (part->weight->bytes.data() !=
            first.weight->bytes.data() +
                bytes_of(first.weight->bytes.dtype(), epilogue.n * residual.size(1))) {
            return false;
        }
        epilogue.n += part->weight->out_features;
    }
    epilogue.w = reinterpret_cast<const T *>(first.weight->bytes.data());
    epilogue.k = residual.size(1);
    epilogue.bias = cuda::reals(nullptr);
    epilogue.out = cuda::reals(*first.out);
    epilogue.ldo = first.out->stride(0);
    if (residual.size(0) <= cuda::max_fused_rows(cuda_stream)) {
        cuda::run_gemm_small_m<T>(cuda_stream, gemm_input(stream, residual, norm, is_normed),
                                  epilogue);
        return true;
    }
    return run_m96<T>(stream, residual, norm, epilogue, tuning, is_normed);
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
    bool is_projected = false;
    if (head_norms.q != nullptr || is_bytes || has_lora) {
        is_projected =
            project<T>(stream, residual, norm, {&q, &k, &v},
                       cuda::m96_qkv_tuning(residual.size(0), residual.size(1)), has_lora);
    } else {
        const cuda::QkvEpilogue<T> epilogue{
            pairs, {weights(q), weights(k), weights(v)}, residual.size(1), 0};
        if (has_blocks(q, k, v)) {
            if (are_adjacent_quantised(q, k, v)) {
                if (run_quantised<T>(stream, residual, norm, *q.weight, epilogue)) {
                    return;
                }
                is_projected = run_f8_norm(stream, residual, norm, *q.weight,
                                           epilogue.pairs.s.heads() * kv.head_dim, *q.out);
            }
        } else if (n <= cuda::max_fused_rows(cuda_stream)) {
            cuda::run_gemm_small_m<T>(cuda_stream, gemm_input(stream, residual, norm), epilogue);
            return;
        } else if (run_m96<T>(stream, residual, norm, epilogue,
                              cuda::m96_qkv_tuning(n, residual.size(1)))) {
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

// Norm kernel, then gemm_swiglu_sm90.cuh; false where it is not supported or not the fastest.
template <typename T>
bool run_swiglu_gemm(const device::Stream &stream, const Tensor &residual, const Norm &norm,
                     const cuda::SwigluEpilogue<T> &epilogue) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    if (cuda_stream.is_exact || !cuda::has_gemm_swiglu_sm90(cuda_stream) ||
        !cuda::fills_swiglu_tiles(cuda_stream, residual.size(0), epilogue.n) ||
        norm.normed.stride(0) % 8 != 0 || epilogue.n % 8 != 0 || epilogue.ldo % 8 != 0 ||
        reinterpret_cast<uintptr_t>(epilogue.out) % 16 != 0) {
        return false;
    }
    rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
    cuda::run_gemm_swiglu_sm90<T>(cuda_stream, epilogue.out, epilogue.ldo,
                                  reinterpret_cast<const T *>(norm.normed.data()),
                                  norm.normed.stride(0), epilogue.gate, epilogue.up,
                                  residual.size(0), epilogue.n, epilogue.k);
    return true;
}

// Norm kernel, then gemm_swiglu_m256.cuh; false where it is not supported.
template <typename T>
bool run_swiglu_m256(const device::Stream &stream, const Tensor &residual, const Norm &norm,
                     const cuda::SwigluEpilogue<T> &epilogue) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const cuda::SwigluM256<T> product{reinterpret_cast<const T *>(norm.normed.data()),
                                      epilogue.gate,
                                      epilogue.up,
                                      epilogue.out,
                                      norm.normed.stride(0),
                                      epilogue.ldo,
                                      int(residual.size(0)),
                                      int(epilogue.n),
                                      int(epilogue.k)};
    if (cuda_stream.is_exact || residual.size(0) > cuda::kSwigluM256MaxM ||
        !cuda::can_gemm_swiglu_m256(cuda_stream, product)) {
        return false;
    }
    rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
    cuda::run_gemm_swiglu_m256<T>(
        cuda_stream, product,
        cuda::swiglu_m256_units(cuda_stream, product.m, product.n, product.k));
    return true;
}

// False: the caller composes the plain operators.
template <typename T>
bool mlp_input(const device::Stream &stream, const Tensor &residual, const Norm &norm,
               const LinearPart &gate, const LinearPart &up) {
    cuda::SwigluEpilogue<T> epilogue{};
    epilogue.gate = reinterpret_cast<const T *>(gate.weight->bytes.data());
    epilogue.up = reinterpret_cast<const T *>(up.weight->bytes.data());
    epilogue.n = gate.weight->out_features;
    epilogue.k = residual.size(1);
    epilogue.out = reinterpret_cast<T *>(gate.out->data());
    epilogue.ldo = gate.out->stride(0);
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
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
    if (residual.size(0) > cuda::max_fused_rows(cuda_stream)) {
        return run_m96<T>(stream, residual, norm, epilogue,
                          cuda::m96_gate_up_tuning(residual.size(0), epilogue.k)) ||
               run_swiglu_m256<T>(stream, residual, norm, epilogue) ||
               run_swiglu_gemm<T>(stream, residual, norm, epilogue);
    }
    cuda::run_gemm_small_m<T>(cuda_stream, gemm_input(stream, residual, norm), epilogue);
    return true;
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
    const int64_t n = weight.out_features;
    cuda::LinearEpilogue<T> epilogue{};
    epilogue.w = reinterpret_cast<const T *>(weight.bytes.data());
    epilogue.n = n;
    epilogue.k = k;
    epilogue.bias = cuda::reals(nullptr);
    epilogue.out = cuda::reals(logits);
    epilogue.ldo = logits.stride(0);
    const bool is_quant = is_quantised(weight.dtype());
    const bool can_fuse =
        is_quant
            ? cuda::can_gemm_small_m_quant(cuda_stream, m, k) &&
                  cuda::quant_gemm_norms<T>(cuda_stream, quant_matrix_of(weight), m, k, epilogue)
            : cuda::can_fuse_norm(cuda_stream, m, k);
    if (m <= cuda::max_fused_rows(cuda_stream) && can_fuse) {
        cuda::GemmInput in{};
        in.m = int(m);
        in.k = int(k);
        in.residual = residual.as<float>();
        in.ld_residual = residual.stride(0);
        in.rows = rows.as<int32_t>();
        in.norm_weight = norm.weight.as<float>();
        in.epsilon = norm.epsilon;
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
    const bool is_quant = has_blocks(q, k, v);
    if (is_quant && residual.size(0) > 0 && is_fast(residual, norm, q) &&
        !reads_quantised(stream, *q.weight, residual.size(0), norm.normed.dtype())) {
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
    const bool has_qk_norm = head_norms.q != nullptr || head_norms.k != nullptr;
    const bool is_bytes = is_eight_bits(placement.kv.k.dtype());
    if (is_bytes && !cuda::can_reduce_head(placement.kv.head_dim)) {
        return false;
    }
    if (has_qk_norm && (head_norms.q == nullptr || head_norms.k == nullptr ||
                        !cuda::can_reduce_head(placement.kv.head_dim) ||
                        head_norms.q->size(0) != placement.kv.head_dim ||
                        !is_16_byte_aligned(*head_norms.q) || !is_16_byte_aligned(*head_norms.k))) {
        return false;
    }
    const bool has_rope_kernel =
        has_qk_norm || is_bytes || is_quant || adapters.rows != nullptr ||
        residual.size(0) > cuda::max_fused_rows(device::cuda_stream_of(stream));
    if (!is_fast(residual, norm, q) || !is_fast(residual, norm, k) || !is_fast(residual, norm, v) ||
        operand_dtype(k, norm) != dtype || operand_dtype(v, norm) != dtype ||
        q.out->dtype() != dtype || (!is_bytes && placement.kv.k.dtype() != dtype) ||
        placement.rope_factor != 1.0f || placement.kv.head_dim != 2 * placement.inv_freq.size(0) ||
        placement.kv.head_dim % 16 != 0 || placement.kv.head_dim > 2 * cuda::kMaxPairs ||
        (has_rope_kernel && !(is_adjacent(*q.out, *k.out) && is_adjacent(*k.out, *v.out) &&
                              is_16_byte_aligned(*q.out) && q.out->stride(0) % 8 == 0 &&
                              is_16_byte_aligned(placement.kv.k) &&
                              is_16_byte_aligned(placement.kv.v) && is_bias_16_byte_aligned(q) &&
                              is_bias_16_byte_aligned(k) && is_bias_16_byte_aligned(v)))) {
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
    if ((has_blocks(gate) || has_blocks(up)) && residual.size(0) > 0 &&
        is_fast(residual, norm, gate) &&
        !reads_quantised(stream, *gate.weight, residual.size(0), norm.normed.dtype())) {
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
