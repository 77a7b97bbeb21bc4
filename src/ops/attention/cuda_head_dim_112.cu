#include "ops/attention/cuda_launch.cuh"

namespace llaisys::ops::cuda {

void launch_attention_112(const AttentionLaunch &launch) { launch_attention<112>(launch); }

} // namespace llaisys::ops::cuda
