// Bulk copies of boxes of a tensor (cp.async.bulk.tensor): compute capability 9 and above. A map says how a
// tensor lies in memory and how large a box is; it is made on the host and given to a kernel by value, as a
// __grid_constant__ parameter. What of a box lies outside of the tensor is filled with zeros and counts as
// copied.
//
// A box is 64 columns of 16-bit values (128 bytes) and some rows; in shared memory its rows lie one behind the
// other, their 16-byte chunks turned as wgmma.cuh wants them. It begins on a multiple of 1,024 bytes there.
#pragma once

#include "ops/cuda/common.cuh"

#include <cuda.h>

#include <type_traits>

namespace llaisys::ops::cuda {

constexpr int kBoxColumns = 64;
constexpr uint32_t kBoxRowBytes = kBoxColumns * 2;

// The driver's cuTensorMapEncodeTiled; null where it has none.
using EncodeTensorMap = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                     const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                     const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
inline EncodeTensorMap encode_tensor_map() {
    static const EncodeTensorMap function = [] {
        void *found = nullptr;
        cudaDriverEntryPointQueryResult result{};
        const cudaError_t status = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
        if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) {
            cudaGetLastError();
            return EncodeTensorMap(nullptr);
        }
        return reinterpret_cast<EncodeTensorMap>(found);
    }();
    return function;
}

// Of a tensor of Rank dimensions, the columns first; strides, in values, of all but these; box: rows in each
// of the others.
template <typename T, int Rank>
CUtensorMap boxes_of(const T *data, const int64_t (&sizes)[Rank],
                     const int64_t (&strides)[Rank - 1], const uint32_t (&rows)[Rank - 1]) {
    cuuint64_t all_sizes[Rank], bytes[Rank - 1];
    cuuint32_t box[Rank], ones[Rank];
    for (int i = 0; i < Rank; ++i) {
        all_sizes[i] = cuuint64_t(sizes[i]);
        box[i] = i == 0 ? kBoxColumns : rows[i - 1];
        ones[i] = 1;
    }
    for (int i = 0; i < Rank - 1; ++i) {
        bytes[i] = cuuint64_t(strides[i]) * sizeof(T);
    }
    constexpr CUtensorMapDataType kType = std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    CUtensorMap map{};
    const CUresult status =
        encode_tensor_map()(&map, kType, Rank, const_cast<T *>(data), all_sizes, bytes, box, ones,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    ensure(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled: status ", int(status), " for ",
           sizes[0], " columns, ", sizes[1], " rows");
    return map;
}

__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, int column, int row,
                                         int plane, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(plane), "r"(barrier)
                 : "memory");
#endif
}
// Of a map whose third dimension is the next 64 columns: from `row` and that many times 64 columns on; policy:
// bulk.cuh.
__device__ __forceinline__ void copy_boxes(uint32_t to, const CUtensorMap *map, int row, int chunk,
                                           uint32_t barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
                 "l"(map), "r"(0), "r"(row), "r"(chunk), "r"(barrier), "l"(policy)
                 : "memory");
#endif
}
// Of maps of two and of five dimensions: from these places on.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, int column, int row,
                                         uint32_t barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
                 : "memory");
#endif
}
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, int column, int a,
                                         int b, int c, int d, uint32_t barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to),
                 "l"(map), "r"(column), "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier), "l"(policy)
                 : "memory");
#endif
}
// Of a map of two dimensions, whatever the second-level cache makes of it: to this block, or to the same place of all
// blocks of the cluster whose bit is set, and to their barriers.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap *map, int column, int row,
                                         uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
#endif
}
__device__ __forceinline__ void copy_box_to(uint32_t blocks, uint32_t to, const CUtensorMap *map,
                                            int column, int row, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(uint16_t(blocks))
                 : "memory");
#endif
}

} // namespace llaisys::ops::cuda
