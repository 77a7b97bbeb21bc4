// ops/cuda/wgmma.cuh by itself: does a descriptor mean what its comment says.
#pragma once

#include "common.cuh"

#include "ops/cuda/wgmma.cuh"

namespace check {

using namespace llaisys::ops::cuda;

// One warpgroup: along[64, 128] = a[64, 64] * b[128, 64]^T and down[64, 128] = p[64, 128] * v[128, 128].
// exchanged: the two distances of the descriptor of v the other way round.
template <typename T>
__global__ void __launch_bounds__(128, 1)
    products_kernel(const T *a, const T *b, const T *p, const T *v, float *along, float *down,
                    int exchanged) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char dynamic[];
    unsigned char *shared = dynamic + ((0u - shared_address(dynamic)) & 1023u);
    unsigned char *of_b = shared + 64 * 128;
    unsigned char *of_v = of_b + 128 * 128;
    const int t = threadIdx.x;
    const int lane = t % 32;
    const int warp = t / 32;
    const auto put = [&](unsigned char *to, const T *from, int rows, int columns) {
        for (int c = t; c < rows * columns / 8; c += 128) {
            const int row = c / (columns / 8);
            const int chunk = c % (columns / 8);
            *reinterpret_cast<uint4 *>(to + chunk / 8 * (rows * 128) + swizzled(row, chunk % 8)) =
                *reinterpret_cast<const uint4 *>(from + row * columns + chunk * 8);
        }
    };
    put(shared, a, 64, 64);
    put(of_b, b, 128, 64);
    put(of_v, v, 128, 128);
    show_to_products();
    __syncthreads();
    float s[64] = {};
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        Wgmma<T>::along(s, descriptor_along(shared_address(shared) + step * 32),
                        descriptor_along(shared_address(of_b) + step * 32), step > 0);
    }
    products_end_group();
    products_wait<0>();
    settle(s);
    float d[64] = {};
    uint32_t weights[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int row = warp * 16 + lane / 4 + (i & 1) * 8;
        const int column = i / 4 * 16 + (i >> 1 & 1) * 8 + lane % 4 * 2;
        weights[i] = *reinterpret_cast<const uint32_t *>(p + row * 128 + column);
    }
    products_begin();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        const uint32_t at = shared_address(of_v) + step * 16 * 128;
        Wgmma<T>::down(d, weights + 4 * step,
                       exchanged ? descriptor(at, 1024, 128 * 128)
                                 : descriptor_down(at, 128 * 128));
    }
    products_end_group();
    products_wait<0>();
    settle(d);
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int row = warp * 16 + lane / 4 + (i >> 1 & 1) * 8;
        const int column = i / 4 * 8 + lane % 4 * 2 + (i & 1);
        along[row * 128 + column] = s[i];
        down[row * 128 + column] = d[i];
    }
#endif
}

template <typename T> void check_products(CudaStream &stream) {
    const auto a = normal<T>(64 * 64, 1), b = normal<T>(128 * 64, 2), p = normal<T>(64 * 128, 3),
               v = normal<T>(128 * 128, 4);
    const Array<T> on_a(a), on_b(b), on_p(p), on_v(v);
    Array<float> along(64 * 128), down(64 * 128);
    std::vector<double> want_along(64 * 128), want_down(64 * 128);
    for (int r = 0; r < 64; ++r) {
        for (int c = 0; c < 128; ++c) {
            for (int i = 0; i < 64; ++i) {
                want_along[size_t(r * 128 + c)] +=
                    double(host_float(a[size_t(r * 64 + i)])) * host_float(b[size_t(c * 64 + i)]);
            }
            for (int i = 0; i < 128; ++i) {
                want_down[size_t(r * 128 + c)] +=
                    double(host_float(p[size_t(r * 128 + i)])) * host_float(v[size_t(i * 128 + c)]);
            }
        }
    }
    constexpr size_t kBytes = 1024 + 64 * 128 + 128 * 128 + 2 * 128 * 128;
    allow_shared(products_kernel<T>, kBytes);
    for (const int exchanged : {0, 1}) {
        along.poison();
        down.poison();
        launch(stream, products_kernel<T>, 1, 128, kBytes, false, on_a.get(), on_b.get(),
               on_p.get(), on_v.get(), along.get(), down.get(), exchanged);
        const Distance of_along = distance(along.host(), want_along);
        const Distance of_down = distance(down.host(), want_down);
        if (exchanged == 0) {
            report(of_along.within(1e-5, 1e-4), line("wgmma %s, k along the rows: relative %.2e",
                                                     name_of<T>(), of_along.relative));
            report(of_down.within(1e-5, 1e-4), line("wgmma %s, k down the rows: relative %.2e",
                                                    name_of<T>(), of_down.relative));
        } else {
            std::printf(
                "note wgmma %s, k down the rows, distances exchanged: relative %.2e (large is "
                "right)\n",
                name_of<T>(), of_down.relative);
        }
    }
}

} // namespace check
