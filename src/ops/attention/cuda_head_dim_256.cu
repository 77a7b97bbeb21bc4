#include "ops/attention/cuda_launch.cuh"

namespace llaisys::ops::cuda {

template void launch_attention<256>(const AttentionLaunch &);

} // namespace llaisys::ops::cuda
