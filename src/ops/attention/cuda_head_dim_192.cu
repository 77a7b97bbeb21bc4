#include "ops/attention/cuda_launch.cuh"

namespace llaisys::ops::cuda {

void launch_attention_192(const AttentionLaunch &launch) { launch_attention<192>(launch); }

} // namespace llaisys::ops::cuda
