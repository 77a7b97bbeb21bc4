// The probes for avx512. Everything is in the namespace that simd_avx512.hpp opens.
#include "device/cpu/simd_avx512.hpp"

#include "device/cpu/probe_kernel.hpp"
