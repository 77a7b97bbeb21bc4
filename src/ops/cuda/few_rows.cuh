// Products with few rows: which kernel is the fastest where.
//
//   compute capability 9 and above    one_row.cuh for one row, row_ring.cuh for more and for short ones
//                                     that are normalised; both have the norm inside; an exact stream has
//                                     row_ring.cuh alone
//   8                                 skinny.cuh, the norm inside for one row
//
// Products that only add to f32 rows have box_ring.cuh besides; ops/linear chooses.
#pragma once

#include "ops/cuda/one_row.cuh"
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
    return can_one_row(stream, m, k, true) || can_ring(stream, m, k, true) ||
           (!has_bulk_copies(stream) && m == 1 && k % 8 == 0 &&
            k <= int64_t(kSkinnyThreads) * 4 * kNormVectors);
}

template <typename T, typename Use>
void run_few_rows(const device::CudaStream &stream, const FewRowsInput &in, Use use,
                  const RingTuning &tuning = {}) {
    use.items = items_of_unit(stream, use.count());
    const bool norms = in.residual != nullptr;
    if (can_one_row(stream, in.m, in.k, norms) && !(norms && in.k <= kShortRow)) {
        run_one_row<T>(stream, in, use);
    } else if (can_ring(stream, in.m, in.k, norms)) {
        run_row_ring<T>(stream, in, use, tuning);
    } else {
        run_skinny<T>(stream, in, use);
    }
}

} // namespace llaisys::ops::cuda
