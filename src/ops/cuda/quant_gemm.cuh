// GEMMs with quantised weights: selection by the codes. The kernels of an epilogue are instantiated
// once per codes (LLAISYS_QUANT_GEMM), in files of their own, because they compile slowly.
#pragma once

#include "ops/cuda/gemm_small_m_quant.cuh"

namespace llaisys::ops::cuda {

// run_gemm_small_m_quant; MayStream as there.
template <typename T, QuantCodes Codes, bool MayStream, typename Epilogue>
void quant_gemm_of(const device::CudaStream &stream, const GemmInput &in, const QuantMatrix &w,
                   const Epilogue &epilogue);

template <typename T, bool MayStream, typename Epilogue>
void quant_gemm(const device::CudaStream &stream, const GemmInput &in, const QuantMatrix &w,
                const Epilogue &epilogue) {
    switch (w.layout.codes) {
    case QuantCodes::int4:
        return quant_gemm_of<T, QuantCodes::int4, MayStream>(stream, in, w, epilogue);
    case QuantCodes::int8:
        return quant_gemm_of<T, QuantCodes::int8, MayStream>(stream, in, w, epilogue);
    case QuantCodes::f8:
        return quant_gemm_of<T, QuantCodes::f8, MayStream>(stream, in, w, epilogue);
    }
}

#define LLAISYS_QUANT_GEMM(T, Codes, MayStream, Epilogue)                                          \
    template <>                                                                                    \
    void quant_gemm_of<T, Codes, MayStream, Epilogue<T>>(                                          \
        const device::CudaStream &stream, const GemmInput &in, const QuantMatrix &w,               \
        const Epilogue<T> &epilogue) {                                                             \
        run_gemm_small_m_quant<T, Codes, MayStream>(stream, in, w, epilogue);                      \
    }

} // namespace llaisys::ops::cuda
