// GEMMs with quantised weights: selection by the codes and the number of rows. The kernels of an
// epilogue are instantiated once per codes (LLAISYS_QUANT_GEMM), in files of their own, because
// they compile slowly.
//
//   1 row: gemv_quant.cuh, not for int4 with groups of 16 and batch-invariant streams
//   2 to 96 rows (int4: 128, int8: 32), bf16, compute capability 9.0, not int4 with groups of 16:
//   gemm_tma_quant.cuh
//   up to 16 rows otherwise: gemm_small_m_quant.cuh
#pragma once

#include "ops/cuda/gemm_small_m_quant.cuh"
#include "ops/cuda/gemm_tma_quant.cuh"
#include "ops/cuda/gemv_quant.cuh"

namespace llaisys::ops::cuda {

// run_gemm_small_m_quant
template <typename T, QuantCodes Codes, typename Epilogue>
void quant_gemm_of(device::CudaStream &stream, const GemmInput &in, const QuantMatrix &w,
                   const Epilogue &epilogue);
// run_gemm_tma_quant
template <QuantCodes Codes, typename Epilogue>
void quant_tma_of(device::CudaStream &stream, const GemmInput &in, const QuantMatrix &w,
                  const Epilogue &epilogue);

// Whether quant_gemm uses gemm_tma_quant.cuh.
template <typename T, typename Epilogue>
bool uses_gemm_tma_quant(const device::CudaStream &stream, const QuantMatrix &w, int64_t m,
                         int64_t k, const Epilogue &epilogue) {
    return std::is_same_v<T, bf16> && !can_gemv_quant(stream, w.layout, m, k) &&
           can_gemm_tma_quant(stream, w.layout, epilogue.atom_rows(), m, k);
}

// Whether quant_gemm normalizes its input.
template <typename T, typename Epilogue>
bool quant_gemm_norms(const device::CudaStream &stream, const QuantMatrix &w, int64_t m, int64_t k,
                      const Epilogue &epilogue) {
    return w.layout.codes != QuantCodes::int4 || !uses_gemm_tma_quant<T>(stream, w, m, k, epilogue);
}

template <typename T, typename Epilogue>
void quant_gemm(device::CudaStream &stream, const GemmInput &in, const QuantMatrix &w,
                const Epilogue &epilogue) {
    if constexpr (std::is_same_v<T, bf16>) {
        if (uses_gemm_tma_quant<T>(stream, w, in.m, in.k, epilogue)) {
            return dispatch_codes(w.layout.codes, [&](auto codes) {
                quant_tma_of<codes()>(stream, in, w, epilogue);
            });
        }
    }
    dispatch_codes(w.layout.codes,
                   [&](auto codes) { quant_gemm_of<T, codes()>(stream, in, w, epilogue); });
}

#define LLAISYS_QUANT_GEMM_OF(T, Codes, Epilogue)                                                  \
    template <>                                                                                    \
    void quant_gemm_of<T, Codes, Epilogue<T>>(device::CudaStream & stream, const GemmInput &in,    \
                                              const QuantMatrix &w, const Epilogue<T> &epilogue) { \
        if constexpr (Codes != QuantCodes::f8) {                                                   \
            if (can_gemv_quant(stream, w.layout, in.m, in.k)) {                                    \
                return run_gemv_quant<T, Codes>(stream, in, w, epilogue);                          \
            }                                                                                      \
        }                                                                                          \
        run_gemm_small_m_quant<T, Codes>(stream, in, w, epilogue);                                 \
    }

#define LLAISYS_QUANT_GEMM(Codes, Epilogue)                                                        \
    LLAISYS_QUANT_GEMM_OF(bf16, Codes, Epilogue)                                                   \
    LLAISYS_QUANT_GEMM_OF(f16, Codes, Epilogue)                                                    \
    template <>                                                                                    \
    void quant_tma_of<Codes, Epilogue<bf16>>(device::CudaStream & stream, const GemmInput &in,     \
                                             const QuantMatrix &w,                                 \
                                             const Epilogue<bf16> &epilogue) {                     \
        run_gemm_tma_quant<Codes>(stream, in, w, epilogue);                                        \
    }

} // namespace llaisys::ops::cuda
