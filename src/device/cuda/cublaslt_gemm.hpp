// Large GEMMs by cuBLASLt. The library is loaded with the first stream and is optional: without
// it the kernels of ops/cuda are used.
#pragma once

#include "base/dtype.hpp"

#include <cuda_runtime_api.h>

#include <memory>

namespace llaisys::device {

// out[m, n] (+)= x[m, k] * weight[n, k]^T, f32 accumulation. Row-major; strides in elements.
struct GemmProblem {
    int64_t m, n, k;
    DType dtype; // of x and weight: f16, bf16, or f8_g128 for e4m3 values with the scales below
    const void *x;
    int64_t ldx;
    const void *weight; // contiguous
    void *out;
    int64_t ldo;
    DType out_dtype;  // f32 or dtype; f32, f16 or bf16 with e4m3
    bool accumulates; // add to out
    // e4m3: out is multiplied by one scale per row of x [m] and of weight [n].
    const float *x_scales = nullptr;
    const float *weight_scales = nullptr;
};

class CublasLtGemm {
public:
    // Null when cuBLASLt is not part of this build or cannot be loaded.
    static std::unique_ptr<CublasLtGemm> open(int device_id);
    virtual ~CublasLtGemm() = default;

    // Queues the GEMM; false when there is no algorithm. The first call of a shape uses the first
    // heuristic result. With may_try, for the row counts of captured steps and outside of stream
    // capture, the first call uses the algorithm that an earlier process found to be the fastest
    // (TuningFile), or times several and remembers the fastest.
    virtual bool run(cudaStream_t stream, const GemmProblem &product, bool may_try) = 0;

    // Exact number of rows of run_invariant.
    static constexpr int64_t kInvariantRows = 128;
    // Batch-invariant GEMM: an algorithm without split-K whose rows have the same bits at every
    // position among kInvariantRows, verified once on identical rows. x and out are contiguous,
    // out is f32 and overwritten. False when there is none. The first call of a shape must not be
    // captured.
    virtual bool run_invariant(cudaStream_t stream, const GemmProblem &product) = 0;
};

} // namespace llaisys::device
