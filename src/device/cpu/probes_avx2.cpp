// The probes for avx2. Everything is in the namespace that simd_avx2.hpp opens.
#include "device/cpu/simd_avx2.hpp"

#include "device/cpu/probe_kernel.hpp"
