// Checks the wgmma descriptors of ops/cuda/wgmma.cuh.
#pragma once

#include "common.cuh"

#include "ops/cuda/wgmma.cuh"

namespace check {

using namespace llaisys::ops::cuda;

// One warpgroup: k_major[64, 128] = a[64, 64] * b[128, 64]^T and mn_major[64, 128] = p[64, 128] *
// v[128, 128]. exchanged: leading and stride offsets of the descriptor of v swapped.
template <typename T>
__global__ void __launch_bounds__(128, 1)
    wgmma_kernel(const T *a, const T *b, const T *p, const T *v, float *k_major, float *mn_major,
                 int exchanged) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char dynamic[];
    unsigned char *shared = dynamic + ((0u - smem_address(dynamic)) & 1023u);
    unsigned char *of_b = shared + 64 * 128;
    unsigned char *of_v = of_b + 128 * 128;
    const int t = threadIdx.x;
    const int lane = t % 32;
    const int warp = t / 32;
    const auto put = [&](unsigned char *to, const T *from, int rows, int columns) {
        for (int c = t; c < rows * columns / 8; c += 128) {
            const int row = c / (columns / 8);
            const int chunk = c % (columns / 8);
            *reinterpret_cast<uint4 *>(to + chunk / 8 * (rows * 128) +
                                       swizzle_128b(row, chunk % 8)) =
                *reinterpret_cast<const uint4 *>(from + row * columns + chunk * 8);
        }
    };
    put(shared, a, 64, 64);
    put(of_b, b, 128, 64);
    put(of_v, v, 128, 128);
    fence_proxy_async();
    __syncthreads();
    float s[64] = {};
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        Wgmma<T>::k_major(s, k_major_descriptor(smem_address(shared) + step * 32),
                          k_major_descriptor(smem_address(of_b) + step * 32), step > 0);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    fence_operands(s);
    float d[64] = {};
    uint32_t weights[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int row = warp * 16 + lane / 4 + (i & 1) * 8;
        const int column = i / 4 * 16 + (i >> 1 & 1) * 8 + lane % 4 * 2;
        weights[i] = *reinterpret_cast<const uint32_t *>(p + row * 128 + column);
    }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        const uint32_t at = smem_address(of_v) + step * 16 * 128;
        Wgmma<T>::mn_major(d, weights + 4 * step,
                           exchanged ? wgmma_descriptor(at, 1024, 128 * 128)
                                     : mn_major_descriptor(at, 128 * 128),
                           1);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    fence_operands(d);
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int row = warp * 16 + lane / 4 + (i >> 1 & 1) * 8;
        const int column = i / 4 * 8 + lane % 4 * 2 + (i & 1);
        k_major[row * 128 + column] = s[i];
        mn_major[row * 128 + column] = d[i];
    }
#endif
}

template <typename T> void check_wgmma(CudaStream &stream) {
    const auto a = normal<T>(64 * 64, 1), b = normal<T>(128 * 64, 2), p = normal<T>(64 * 128, 3),
               v = normal<T>(128 * 128, 4);
    const Array<T> on_a(a), on_b(b), on_p(p), on_v(v);
    Array<float> k_major(64 * 128), mn_major(64 * 128);
    std::vector<double> want_k_major(64 * 128), want_mn_major(64 * 128);
    for (int r = 0; r < 64; ++r) {
        for (int c = 0; c < 128; ++c) {
            for (int i = 0; i < 64; ++i) {
                want_k_major[size_t(r * 128 + c)] +=
                    double(host_float(a[size_t(r * 64 + i)])) * host_float(b[size_t(c * 64 + i)]);
            }
            for (int i = 0; i < 128; ++i) {
                want_mn_major[size_t(r * 128 + c)] +=
                    double(host_float(p[size_t(r * 128 + i)])) * host_float(v[size_t(i * 128 + c)]);
            }
        }
    }
    constexpr size_t kBytes = 1024 + 64 * 128 + 128 * 128 + 2 * 128 * 128;
    set_max_dynamic_smem(wgmma_kernel<T>, kBytes);
    for (const int exchanged : {0, 1}) {
        k_major.poison();
        mn_major.poison();
        launch(stream, wgmma_kernel<T>, 1, 128, kBytes, false, on_a.get(), on_b.get(), on_p.get(),
               on_v.get(), k_major.get(), mn_major.get(), exchanged);
        const Distance k_major_error = distance(k_major.host(), want_k_major);
        const Distance mn_major_error = distance(mn_major.host(), want_mn_major);
        if (exchanged == 0) {
            report(k_major_error.within(1e-5, 1e-4),
                   line("wgmma %s, K-major: relative %.2e", name_of<T>(), k_major_error.relative));
            report(mn_major_error.within(1e-5, 1e-4), line("wgmma %s, MN-major: relative %.2e",
                                                           name_of<T>(), mn_major_error.relative));
        } else {
            std::printf("note wgmma %s, MN-major, offsets swapped: relative %.2e (large is "
                        "right)\n",
                        name_of<T>(), mn_major_error.relative);
        }
    }
}

} // namespace check
