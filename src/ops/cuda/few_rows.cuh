// Products with few rows: which kernel is the fastest where.
//
//   compute capability 9 and above    row_ring.cuh, also with the norm inside
//   8                                 skinny.cuh, the norm inside for one row
#pragma once

#include "ops/cuda/row_ring.cuh"
#include "ops/cuda/skinny.cuh"

namespace llaisys::ops::cuda {

constexpr int kFewRows = kSkinnyRows; // most rows of x

// Up to so many rows the products of a decoder layer are fused with what comes before and after them.
// An exact stream has one way for all numbers of rows.
inline int64_t most_fused_rows(const device::CudaStream &stream) {
    return stream.is_exact ? 0 : kFewRows;
}

// Whether m rows of k values can be normalised inside the product.
inline bool can_norm_inside(const device::CudaStream &stream, int64_t m, int64_t k) {
    return can_ring(stream, m, k, true) || (!has_bulk_copies(stream) && m == 1 && k % 8 == 0 &&
                                            k <= int64_t(kSkinnyThreads) * 4 * kNormVectors);
}

template <typename T, typename Use>
void run_few_rows(const device::CudaStream &stream, const FewRowsInput &in, Use use,
                  const RingTuning &tuning = {}) {
    use.items = items_of_unit(stream, use.count());
    if (can_ring(stream, in.m, in.k, in.residual != nullptr)) {
        run_row_ring<T>(stream, in, use, tuning);
    } else {
        run_skinny<T>(stream, in, use);
    }
}

} // namespace llaisys::ops::cuda
