// GEMM with small M (up to 16 rows of x): kernel selection.
//
//   compute capability 9 and above    gemv_sm90.cuh for M = 1; gemm_small_m_bulk.cuh for larger M, for
//                                     short K with a fused norm, and for batch-invariant streams; both
//                                     fuse the RMS norm
//   8                                 gemm_small_m_sm80.cuh; fuses the RMS norm for M = 1
//
// ops/linear selects gemm_tma_splitk.cuh for GEMMs that only accumulate into f32 rows.
#pragma once

#include "ops/cuda/gemm_small_m_bulk.cuh"
#include "ops/cuda/gemm_small_m_sm80.cuh"
#include "ops/cuda/gemv_sm90.cuh"

namespace llaisys::ops::cuda {

constexpr int kSmallM = kSm80MaxM; // largest M

// Largest M for which the GEMMs of a decoder layer have fused prologue and epilogue. 0 for
// batch-invariant streams, which use one path for all M.
inline int64_t max_fused_rows(const device::CudaStream &stream) {
    return stream.is_exact ? 0 : kSmallM;
}

// Whether the kernel can apply the RMS norm of m rows of k values.
inline bool can_fuse_norm(const device::CudaStream &stream, int64_t m, int64_t k) {
    return can_gemv_sm90(stream, m, k, true) || can_gemm_small_m_bulk(stream, m, k, true) ||
           (!has_bulk_copy(stream) && m == 1 && k % 8 == 0 &&
            k <= int64_t(kSm80Threads) * 4 * kNormVectors);
}

template <typename T, typename Epilogue>
void run_gemm_small_m(const device::CudaStream &stream, const GemmInput &in, Epilogue epilogue,
                      const BulkTuning &tuning = {}) {
    epilogue.items = choose_unit_items(stream, epilogue.count());
    const bool norms = in.residual != nullptr;
    if (can_gemv_sm90(stream, in.m, in.k, norms) && !(norms && in.k <= kBulkShortK)) {
        run_gemv_sm90<T>(stream, in, epilogue);
    } else if (can_gemm_small_m_bulk(stream, in.m, in.k, norms)) {
        run_gemm_small_m_bulk<T>(stream, in, epilogue, tuning);
    } else {
        run_gemm_small_m_sm80<T>(stream, in, epilogue);
    }
}

} // namespace llaisys::ops::cuda
