#include "ops/attention/cuda_latent.cuh"

namespace llaisys::ops::cuda {

bool has_latent_attention(const device::CudaStream &stream) {
    return LatentShape<1>::kSharedBytes + kLatentStaticBytes <= stream.max_shared_bytes;
}

void launch_latent_attention(const AttentionLaunch &launch) {
    dispatch_half(launch.dtype, [&](auto type) {
        run_latent<decltype(type)>(launch.stream, launch.args, launch.n, launch.runs);
    });
}

} // namespace llaisys::ops::cuda
