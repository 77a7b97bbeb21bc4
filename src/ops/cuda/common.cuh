// What the CUDA kernels share: values of any real dtype, reductions, launches.
//
// A kernel that is part of the decode chain is launched early (programmatic dependent launch): it
// may start while the one before it still runs, calls wait_for_input() before it touches anything
// that another kernel wrote, and allow_next() as soon as the next one may be brought in.
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

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffffu;

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

// Values of a dtype that is known when the kernel runs; for kernels that wait for memory anyway.
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
        default: // reals() has refused it
            __trap();
            return 0.0f;
        }
    }
    // The value as it lies there: what reads it does not wait until value_of() is called.
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
    visit_real(tensor.dtype(), [](auto) {}); // throws for what the switches above do not know
    return {tensor.data(), tensor.dtype()};
}
inline Reals reals(const Tensor *tensor) {
    return tensor != nullptr ? reals(*tensor) : Reals{nullptr, LLAISYS_DTYPE_F32};
}

// Sine and cosine of position * frequency. The product is taken in double: it may be thousands of
// turns, of which only the last one counts.
__device__ __forceinline__ void turn_of(int64_t position, float frequency, float *sin, float *cos) {
    const double turns = double(position) * double(frequency) * 0.15915494309189535;
    sincospif(2.0f * float(turns - rint(turns)), sin, cos);
}

// 2^x to about 2 units in the last place, 0 where that is too small for a normal number.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two neighbouring values as one register of the tensor cores' operands.
template <typename T> __device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <> __device__ __forceinline__ uint32_t pack_pair<bf16>(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}
template <> __device__ __forceinline__ uint32_t pack_pair<f16>(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

// -- Reductions -----------------------------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float x) {
    for (int step = 16; step > 0; step >>= 1) {
        x += __shfl_xor_sync(kAll, x, step);
    }
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int step = 16; step > 0; step >>= 1) {
        x = fmaxf(x, __shfl_xor_sync(kAll, x, step));
    }
    return x;
}

// Of all threads of the block, to all of them; scratch: one float a warp. In a fixed order.
template <int Threads> __device__ __forceinline__ float block_sum(float x, float *scratch) {
    x = warp_sum(x);
    __syncthreads(); // scratch may still be read from the call before
    if (threadIdx.x % kWarp == 0) {
        scratch[threadIdx.x / kWarp] = x;
    }
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < Threads / kWarp; ++i) {
        sum += scratch[i];
    }
    return sum;
}

template <int Threads> __device__ __forceinline__ float block_max(float x, float *scratch) {
    x = warp_max(x);
    __syncthreads();
    if (threadIdx.x % kWarp == 0) {
        scratch[threadIdx.x / kWarp] = x;
    }
    __syncthreads();
    float max = scratch[0];
    for (int i = 1; i < Threads / kWarp; ++i) {
        max = fmaxf(max, scratch[i]);
    }
    return max;
}

// -- Tensor cores ---------------------------------------------------------------------------------

// c[16, 8] += a[16, 16] * b[16, 8]; fragments as in the PTX manual (mma.m16n8k16).
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1);
template <>
__device__ __forceinline__ void mma<bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                          uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<f16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
// An 8 x 8 matrix of 16-bit values, rows and columns exchanged across the warp.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
    uint32_t transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(x));
    return transposed;
}

// -- Copies into shared memory --------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// 16 bytes; zeros when `valid` is false.
__device__ __forceinline__ void copy_async(uint32_t shared, const void *global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void copies_end_group() { asm volatile("cp.async.commit_group;"); }
template <int Pending> __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending));
}

// -- Launches -------------------------------------------------------------------------------------

__device__ __forceinline__ void wait_for_input() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void allow_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// early: the kernel calls wait_for_input() and may start before the one before it ends. cluster: so many
// neighbouring blocks (along x) run together and reach each other's shared memory; compute capability 9.
struct LaunchMode {
    LaunchMode(bool starts_early, unsigned blocks = 1) : early(starts_early), cluster(blocks) {}
    bool early;
    unsigned cluster;
};

// Queues a kernel. All early ones ask for the same split of shared memory and first-level cache: a
// processor that has to change it waits until it is empty.
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
    if (mode.early && stream.has_early_launch) {
        cudaLaunchAttribute &early = attributes[config.numAttrs++];
        early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        early.val.programmaticStreamSerializationAllowed = 1;
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

// Lets a kernel have so much shared memory; cheap after the first time.
template <typename Kernel> void allow_shared(Kernel *kernel, size_t bytes) {
    LLAISYS_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel),
                                      cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
}

inline unsigned blocks_for(int64_t n, int64_t per_block) {
    return unsigned((n + per_block - 1) / per_block);
}

} // namespace llaisys::ops::cuda
