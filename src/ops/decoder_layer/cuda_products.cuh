// Products of a decoder layer with a fused norm: their inputs, and the selection of kernels by the
// number of rows (cuda.cu).
#pragma once

#include "ops/cuda/gemm_small_m.cuh"
#include "ops/cuda/gemm_tma_m96.cuh"
#include "ops/cuda/quant_gemm.cuh"
#include "ops/cuda/quant_weight.cuh"
#include "ops/decoder_layer/op.hpp"
#include "ops/norm/op.hpp"

#include <algorithm>

namespace llaisys::ops {

using cuda::is_16_byte_aligned;

inline bool has_blocks(const LinearPart &part) { return is_quantised(part.weight->dtype()); }

// Dtype of the operands of a product: that of the activations when the weight is quantised.
inline DType operand_dtype(const LinearPart &part, const Norm &norm) {
    return has_blocks(part) ? norm.normed.dtype() : part.weight->bytes.dtype();
}

inline bool is_fast(const Tensor &residual, const Norm &norm, const LinearPart &part) {
    const DType dtype = operand_dtype(part, norm);
    return norm.kind == NormKind::rms && dtype != LLAISYS_DTYPE_F32 &&
           norm.normed.dtype() == dtype && residual.dtype() == LLAISYS_DTYPE_F32 &&
           residual.size(1) % 8 == 0 && residual.stride(0) % 4 == 0 &&
           is_16_byte_aligned(residual) && is_16_byte_aligned(norm.normed) &&
           is_16_byte_aligned(part.weight->bytes);
}

// Whether quantised weights, `first` and others, are to be converted before their products.
inline bool must_widen(const device::Stream &stream, const Tensor &residual, const Norm &norm,
                       const LinearPart &first) {
    return residual.size(0) > 0 && is_fast(residual, norm, first) &&
           !reads_quantised(stream, *first.weight, residual.size(0), norm.normed.dtype());
}

// Whether a GEMM can apply the norm weight.
inline bool has_f32_weight(const Norm &norm) {
    return norm.weight.dtype() == LLAISYS_DTYPE_F32 && is_16_byte_aligned(norm.weight);
}

// Input of a GEMM that applies the norm to m rows of the residual stream; rows: their indices, or
// null.
inline cuda::GemmInput residual_input(const Tensor &residual, const Norm &norm, int64_t m,
                                      const int32_t *rows = nullptr) {
    return {nullptr,
            0,
            int(m),
            int(residual.size(1)),
            residual.as<float>(),
            residual.stride(0),
            rows,
            norm.weight.as<float>(),
            norm.epsilon};
}

inline cuda::GemmInput normed_input(const Tensor &residual, const Norm &norm) {
    cuda::GemmInput in{};
    in.x = norm.normed.data();
    in.ldx = norm.normed.stride(0);
    in.m = int(residual.size(0));
    in.k = int(residual.size(1));
    return in;
}

// Residual rows for a fused norm, otherwise normalized rows. is_normed: norm.normed has them.
inline cuda::GemmInput gemm_input(const device::Stream &stream, const Tensor &residual,
                                  const Norm &norm, bool can_fuse, bool is_normed = false) {
    if (!is_normed && can_fuse && has_f32_weight(norm)) {
        return residual_input(residual, norm, residual.size(0));
    }
    if (!is_normed) {
        rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
    }
    return normed_input(residual, norm);
}

// One GEMM over adjacent quantised weights; false where it is not supported. The input is
// normalized by the GEMM, or by a kernel before it.
template <typename T, typename Epilogue>
bool run_quantised(const device::Stream &stream, const Tensor &residual, const Norm &norm,
                   const LinearWeight &first, const Epilogue &epilogue) {
    device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const cuda::QuantMatrix weights = quant_matrix_of(first);
    const int64_t m = residual.size(0), k = residual.size(1);
    if (!cuda::uses_gemm_tma_quant<T>(cuda_stream, weights, m, k, epilogue) &&
        (m > cuda::max_fused_rows(cuda_stream) ||
         !cuda::can_gemm_small_m_quant(cuda_stream, m, k))) {
        return false;
    }
    const bool can_fuse = cuda::quant_gemm_norms<T>(cuda_stream, weights, m, k, epilogue);
    cuda::quant_gemm<T>(cuda_stream, gemm_input(stream, residual, norm, can_fuse), weights,
                        epilogue);
    return true;
}

// Adjacent f8 weights with e4m3 rows of the normalized input; false where it is not supported.
inline bool run_f8_norm(const device::Stream &stream, const Tensor &residual, const Norm &norm,
                        const LinearWeight &first, int64_t n, const Tensor &out) {
    return has_f32_weight(norm) &&
           multiply_f8_rows(stream, residual_input(residual, norm, residual.size(0)),
                            norm.normed.dtype(), first, n, out);
}

// Few rows: gemm_small_m.cuh; otherwise, and where that cannot fuse the norm, a norm kernel, then
// gemm_tma_m96.cuh. False where that is not supported or not the fastest. is_normed: norm.normed has
// the normalized rows.
template <typename T, typename Epilogue>
bool run_fused(const device::Stream &stream, const Tensor &residual, const Norm &norm,
               const Epilogue &epilogue, const cuda::M96Tuning &tuning, bool is_normed = false) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const int64_t m = residual.size(0), k = residual.size(1);
    const bool are_few = m <= cuda::max_fused_rows(cuda_stream);
    const bool can_fuse = are_few && cuda::can_fuse_norm(cuda_stream, m, k);
    const bool has_m96 = !cuda_stream.is_exact &&
                         cuda::can_gemm_tma_m96<T>(cuda_stream, normed_input(residual, norm),
                                                   epilogue.atoms(), tuning);
    if (are_few && (m == 1 || can_fuse || is_normed || !has_m96)) {
        cuda::run_gemm_small_m<T>(
            cuda_stream, gemm_input(stream, residual, norm, can_fuse, is_normed), epilogue);
        return true;
    }
    if (has_m96) {
        cuda::run_gemm_tma_m96<T>(cuda_stream, gemm_input(stream, residual, norm, false, is_normed),
                                  epilogue, tuning);
    }
    return has_m96;
}

// Epilogue that stores the products of n adjacent weight rows.
template <typename T>
cuda::LinearEpilogue<T> store_to(const Tensor &out, const LinearWeight &first, int64_t n) {
    const auto *w = reinterpret_cast<const T *>(first.bytes.data());
    return {w,     n, first.in_features, cuda::reals(nullptr), cuda::reals(out), out.stride(0),
            false, 0};
}

// GEMM of adjacent weights into adjacent outputs, without biases; false where linear is to be used.
// is_normed: norm.normed has the normalized rows.
template <typename T>
bool project(const device::Stream &stream, const Tensor &residual, const Norm &norm,
             std::initializer_list<const LinearPart *> parts, const cuda::M96Tuning &tuning,
             bool is_normed) {
    const LinearPart &first = **parts.begin();
    const int64_t k = residual.size(1);
    const bool is_quant = std::any_of(parts.begin(), parts.end(),
                                      [](const LinearPart *part) { return has_blocks(*part); });
    int64_t n = 0;
    const LinearWeight *before = nullptr;
    for (const LinearPart *part : parts) {
        const LinearWeight &weight = *part->weight;
        if (before != nullptr &&
            !(is_quant ? is_next_quantised(*before, weight)
                       : weight.bytes.data() ==
                             before->bytes.data() +
                                 bytes_of(before->bytes.dtype(), before->out_features * k))) {
            return false;
        }
        n += weight.out_features;
        before = &weight;
    }
    const cuda::LinearEpilogue<T> epilogue = store_to<T>(*first.out, *first.weight, n);
    if (is_quant) {
        return !is_normed && run_quantised<T>(stream, residual, norm, *first.weight, epilogue);
    }
    return run_fused<T>(stream, residual, norm, epilogue, tuning, is_normed);
}

} // namespace llaisys::ops
