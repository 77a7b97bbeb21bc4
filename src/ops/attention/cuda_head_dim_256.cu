#include "ops/attention/cuda_launch.cuh"

namespace llaisys::ops::cuda {

void launch_attention_256(const AttentionLaunch &launch) { launch_attention<256>(launch); }

} // namespace llaisys::ops::cuda
