#include "ops/attention/cuda_launch.cuh"

namespace llaisys::ops::cuda {

void launch_attention_80(const AttentionLaunch &launch) { launch_attention<80>(launch); }

} // namespace llaisys::ops::cuda
