// LLAISYS_HOST_DEVICE: a function compiled for the host and, in *.cu, for CUDA kernels too.
#pragma once

#if defined(__CUDACC__)
#define LLAISYS_HOST_DEVICE __host__ __device__
#else
#define LLAISYS_HOST_DEVICE
#endif
