#include "ops/attention/cuda_launch.cuh"

namespace llaisys::ops::cuda {

void launch_attention_96(const AttentionLaunch &launch) { launch_attention<96>(launch); }

} // namespace llaisys::ops::cuda
