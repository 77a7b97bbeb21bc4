// Shared by the CUDA kernels: type-erased pointers, reductions, PTX wrappers, launches.
//
// Programmatic dependent launch (PDL): a kernel launched with LaunchMode::pdl may start while the
// previous kernel of the stream still runs. It calls grid_dependency_wait() before it reads or
// writes memory that another kernel uses, and launch_dependents() when the next kernel may be
// scheduled.
#pragma once

#include "device/cuda/cuda_runtime.hpp"
#include "tensor/tensor.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace llaisys::ops::cuda {

using bf16 = __nv_bfloat16;
using f16 = __half;

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

// -- Values ---------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    return __float2bfloat16_rn(x);
}
template <> __device__ __forceinline__ f16 from_float<f16>(float x) { return __float2half_rn(x); }

// Pointer to real values whose dtype is a run-time value. For memory-bound kernels.
struct Reals {
    void *data;
    DType dtype;

    __device__ __forceinline__ float load(int64_t i) const {
        switch (dtype) {
        case LLAISYS_DTYPE_F16:
            return to_float(static_cast<const f16 *>(data)[i]);
        case LLAISYS_DTYPE_BF16:
            return to_float(static_cast<const bf16 *>(data)[i]);
        case LLAISYS_DTYPE_F32:
            return static_cast<const float *>(data)[i];
        default: // reals() rejects other dtypes
            __trap();
            return 0.0f;
        }
    }
    // Raw bits of a value. Conversion happens in value_of(), so the load does not stall the
    // caller.
    __device__ __forceinline__ uint32_t load_bits(int64_t i) const {
        return dtype == LLAISYS_DTYPE_F32 ? static_cast<const uint32_t *>(data)[i]
                                          : uint32_t(static_cast<const uint16_t *>(data)[i]);
    }
    __device__ __forceinline__ float value_of(uint32_t bits) const {
        const auto half = uint16_t(bits);
        return dtype == LLAISYS_DTYPE_F32    ? __uint_as_float(bits)
               : dtype == LLAISYS_DTYPE_BF16 ? to_float(reinterpret_cast<const bf16 &>(half))
                                             : to_float(reinterpret_cast<const f16 &>(half));
    }
    __device__ __forceinline__ void store(int64_t i, float value) const {
        switch (dtype) {
        case LLAISYS_DTYPE_F16:
            static_cast<f16 *>(data)[i] = from_float<f16>(value);
            break;
        case LLAISYS_DTYPE_BF16:
            static_cast<bf16 *>(data)[i] = from_float<bf16>(value);
            break;
        case LLAISYS_DTYPE_F32:
            static_cast<float *>(data)[i] = value;
            break;
        default:
            __trap();
        }
    }
};

inline Reals reals(const Tensor &tensor) {
    // throws for dtypes that the switches above do not handle
    visit_real(tensor.dtype(), [](auto) {});
    return {tensor.data(), tensor.dtype()};
}
inline Reals reals(const Tensor *tensor) {
    return tensor != nullptr ? reals(*tensor) : Reals{nullptr, LLAISYS_DTYPE_F32};
}

inline bool is_16_byte_aligned(const void *data) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0;
}
inline bool is_16_byte_aligned(const Tensor &tensor) { return is_16_byte_aligned(tensor.data()); }
// Whether the rows of 16-bit values are, too.
inline bool has_aligned_rows(const Tensor &tensor) {
    bool is_aligned = is_16_byte_aligned(tensor);
    for (int dim = 0; dim + 1 < tensor.ndim(); ++dim) {
        is_aligned = is_aligned && tensor.stride(dim) % 8 == 0;
    }
    return is_aligned;
}

// Sine and cosine of position * frequency. The angle is reduced in double: it may be thousands of
// turns.
__device__ __forceinline__ void rope_sincos(int64_t position, float frequency, float *sin,
                                            float *cos) {
    const double turns = double(position) * double(frequency) * 0.15915494309189535;
    sincospif(2.0f * float(turns - rint(turns)), sin, cos);
}

// ex2.approx.ftz.f32: 2^x to about 2 ulp; subnormal results become 0.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two adjacent values in one 32-bit register of an mma operand.
template <typename T> __device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <> __device__ __forceinline__ uint32_t pack_pair<bf16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}
template <> __device__ __forceinline__ uint32_t pack_pair<f16>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

// Parts of an RMS norm. Vector `at` of n; zeros past the end.
template <typename Index>
__device__ __forceinline__ float4 load_or_zero(const float4 *from, Index at, Index n) {
    return at < n ? from[at] : make_float4(0, 0, 0, 0);
}
__device__ __forceinline__ float sum_of_squares(const float4 &v) {
    return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
}
template <typename T>
__device__ __forceinline__ uint2 normed_pairs(const float4 &v, float factor, const float4 &w) {
    return make_uint2(pack_pair<T>(v.x * factor * w.x, v.y * factor * w.y),
                      pack_pair<T>(v.z * factor * w.z, v.w * factor * w.w));
}

// -- Reductions -----------------------------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float x) {
    for (int step = 16; step > 0; step >>= 1) {
        x += __shfl_xor_sync(kFullMask, x, step);
    }
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int step = 16; step > 0; step >>= 1) {
        x = fmaxf(x, __shfl_xor_sync(kFullMask, x, step));
    }
    return x;
}

// Sum over all threads of the block, returned to every thread, in a fixed order. scratch: one
// float per warp.
template <int Threads> __device__ __forceinline__ float block_sum(float x, float *scratch) {
    x = warp_sum(x);
    __syncthreads(); // the previous call may still read scratch
    if (threadIdx.x % kWarpSize == 0) {
        scratch[threadIdx.x / kWarpSize] = x;
    }
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < Threads / kWarpSize; ++i) {
        sum += scratch[i];
    }
    return sum;
}

template <int Threads> __device__ __forceinline__ float block_max(float x, float *scratch) {
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % kWarpSize == 0) {
        scratch[threadIdx.x / kWarpSize] = x;
    }
    __syncthreads();
    float max = scratch[0];
    for (int i = 1; i < Threads / kWarpSize; ++i) {
        max = fmaxf(max, scratch[i]);
    }
    return max;
}

// -- Tensor cores ---------------------------------------------------------------------------------

// mma.sync.aligned.m16n8k16: c[16, 8] += a[16, 16] * b[16, 8]; fragment layout as in the PTX ISA.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<bf16>(float (&c)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<f16>(float (&c)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ldmatrix.x4: four 8 x 8 matrices of 16-bit values; lane l passes the address of row l % 8 of
// matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
// movmatrix.trans: transposes an 8 x 8 matrix of 16-bit values across the warp.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t x) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(x));
    return transposed;
}

// -- Copies into shared memory --------------------------------------------------------------------

__device__ __forceinline__ uint32_t smem_address(const void *p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// cp.async.cg of 16 bytes; writes zeros when `valid` is false.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void *global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(valid ? 16 : 0));
}
// cp.async.ca of 4 bytes; writes zeros when `valid` is false.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void *global, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global),
                 "r"(valid ? 4 : 0));
}
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;"); }
template <int Pending> __device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending));
}

// -- Launches -------------------------------------------------------------------------------------

__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// pdl: programmatic dependent launch; the kernel must call grid_dependency_wait(). cluster:
// blocks per cluster along x (compute capability 9).
struct LaunchMode {
    LaunchMode(bool uses_pdl, unsigned blocks = 1) : pdl(uses_pdl), cluster(blocks) {}
    bool pdl;
    unsigned cluster;
};

// Queues a kernel. PDL kernels all request the same shared memory carveout: an SM must drain
// before it can change its carveout.
template <typename... Parameters, typename... Arguments>
void launch(const device::CudaStream &stream, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            size_t shared_bytes, LaunchMode mode, Arguments... arguments) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream.stream;
    cudaLaunchAttribute attributes[3] = {};
    config.attrs = attributes;
    if (mode.pdl && stream.has_pdl && stream.allows_pdl) {
        cudaLaunchAttribute &pdl = attributes[config.numAttrs++];
        pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        pdl.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchAttribute &carveout = attributes[config.numAttrs++];
        carveout.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
        carveout.val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    }
    if (mode.cluster > 1) {
        cudaLaunchAttribute &cluster = attributes[config.numAttrs++];
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim.x = mode.cluster;
        cluster.val.clusterDim.y = 1;
        cluster.val.clusterDim.z = 1;
    }
    LLAISYS_CUDA(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}

// Raises the dynamic shared memory limit of a kernel; cheap after the first call.
template <typename Kernel> void set_max_dynamic_smem(Kernel *kernel, size_t bytes) {
    LLAISYS_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel),
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
}

inline unsigned ceil_div(int64_t n, int64_t per_block) {
    return unsigned((n + per_block - 1) / per_block);
}

} // namespace llaisys::ops::cuda
