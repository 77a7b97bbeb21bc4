// TMA loads (cp.async.bulk.tensor): compute capability 9 and above. A tensor map describes a
// tensor in global memory and the size of a TMA tile. It is encoded on the host and passed by
// value as a __grid_constant__ parameter. Elements of a tile outside the tensor are filled with
// zeros and count as transferred bytes.
//
// A TMA tile is 64 columns of 16-bit values (128 bytes per row) and some rows. In shared memory
// it starts at a multiple of 1,024 bytes and has the 128-byte swizzle that wgmma.cuh expects.
#pragma once

#include "ops/cuda/common.cuh"

#include <cuda.h>

#include <algorithm>
#include <type_traits>

namespace llaisys::ops::cuda {

constexpr int kTmaTileK = 64;
constexpr uint32_t kTmaRowBytes = kTmaTileK * 2;

// cuTensorMapEncodeTiled of the driver; null when the driver lacks it.
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

// Tensor map of Rank dimensions, the first one contiguous. strides: in bytes, of all dimensions but
// the first. tile: extent in all dimensions.
template <int Rank>
CUtensorMap encode_map(CUtensorMapDataType type, const void *data, const int64_t (&sizes)[Rank],
                       const cuuint64_t (&strides)[Rank - 1], const uint32_t (&tile)[Rank],
                       CUtensorMapSwizzle swizzle) {
    cuuint64_t all_sizes[Rank];
    cuuint32_t ones[Rank];
    std::copy_n(sizes, Rank, all_sizes);
    std::fill_n(ones, Rank, 1);
    CUtensorMap map{};
    const CUresult status =
        encode_tensor_map()(&map, type, Rank, const_cast<void *>(data), all_sizes, strides, tile,
                            ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    ensure(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled: status ", int(status), " for ",
           sizes[0], " columns, ", sizes[1], " rows");
    return map;
}

// Map of 16-bit values. strides: in values. rows: tile extent in all dimensions but the columns.
template <typename T, int Rank>
CUtensorMap make_tensor_map(const T *data, const int64_t (&sizes)[Rank],
                            const int64_t (&strides)[Rank - 1], const uint32_t (&rows)[Rank - 1]) {
    cuuint64_t bytes[Rank - 1];
    uint32_t tile[Rank] = {kTmaTileK};
    for (int i = 0; i < Rank - 1; ++i) {
        bytes[i] = cuuint64_t(strides[i]) * sizeof(T);
        tile[i + 1] = rows[i];
    }
    constexpr CUtensorMapDataType kType = std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    return encode_map(kType, data, sizes, bytes, tile, CU_TENSOR_MAP_SWIZZLE_128B);
}

// Map of bytes.
template <int Rank>
CUtensorMap make_byte_map(const unsigned char *data, const int64_t (&sizes)[Rank],
                          const int64_t (&strides)[Rank - 1], const uint32_t (&tile)[Rank],
                          CUtensorMapSwizzle swizzle) {
    cuuint64_t bytes[Rank - 1];
    std::copy_n(strides, Rank - 1, bytes);
    return encode_map(CU_TENSOR_MAP_DATA_TYPE_UINT8, data, sizes, bytes, tile, swizzle);
}

// Operands of a GEMM: weights and rows of x.
struct GemmMaps {
    CUtensorMap w, x;
};

__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap *map, int column, int row,
                                         int plane, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(plane), "r"(barrier)
                 : "memory");
}
// Tile of a 3-D map whose third dimension is the K tile (64 columns): starts at `row` and
// `k_tile`. policy: L2 cache policy (mbarrier.cuh).
__device__ __forceinline__ void tma_load_k_tiles(uint32_t to, const CUtensorMap *map, int row,
                                                 int chunk, uint32_t barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
                 "l"(map), "r"(0), "r"(row), "r"(chunk), "r"(barrier), "l"(policy)
                 : "memory");
}
// Tiles of 2-D and 5-D maps at these coordinates, with an L2 cache policy.
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap *map, int column, int row,
                                         uint32_t barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap *map, int column, int a,
                                         int b, int c, int d, uint32_t barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to),
                 "l"(map), "r"(column), "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier), "l"(policy)
                 : "memory");
}
// Tiles of a 2-D map with the default L2 policy: into this block, or multicast to the same offset
// of every block in the cluster mask; each destination's mbarrier receives the bytes.
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap *map, int column, int row,
                                         uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void tma_load_multicast(uint32_t blocks, uint32_t to,
                                                   const CUtensorMap *map, int column, int row,
                                                   uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(uint16_t(blocks))
                 : "memory");
}

} // namespace llaisys::ops::cuda
