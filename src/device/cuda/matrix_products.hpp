// Large matrix products by cuBLASLt, which is loaded when the first stream is made and need not be
// there: kernels of our own take over then.
#pragma once

#include "base/dtype.hpp"

#include <cuda_runtime_api.h>

#include <memory>

namespace llaisys::device {

// out[m, n] (+)= x[m, k] * weight[n, k]^T, sums in f32. Row-major; strides in elements.
struct MatrixProduct {
    int64_t m, n, k;
    DType dtype; // of x and weight: f16 or bf16
    const void *x;
    int64_t ldx;
    const void *weight; // dense
    void *out;
    int64_t ldo;
    DType out_dtype;  // f32 or dtype
    bool accumulates; // add to what is in out
};

class MatrixProducts {
public:
    // Null when cuBLASLt is not part of this build or cannot be loaded.
    static std::unique_ptr<MatrixProducts> open(int device_id);
    virtual ~MatrixProducts() = default;

    // Queues the product; false when there is no algorithm for it. The first product of a shape takes the
    // first proposal; the first one that may try, for the rows of recorded steps and unless the stream is
    // being captured, tries several and keeps the fastest.
    virtual bool run(cudaStream_t stream, const MatrixProduct &product, bool may_try) = 0;

    // Rows of a product by run_even, no more and no less.
    static constexpr int64_t kEvenRows = 128;
    // The same by an algorithm that gives a row the same bits wherever it stands among kEvenRows: one
    // that sums along k without a break, tried once on rows that are all alike. x and out are dense,
    // out is f32 and not added to. False when none does so. The first product of a shape must not be
    // captured.
    virtual bool run_even(cudaStream_t stream, const MatrixProduct &product) = 0;
};

} // namespace llaisys::device
