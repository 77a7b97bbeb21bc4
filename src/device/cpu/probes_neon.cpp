// The probes for neon. Everything is in the namespace that simd_neon.hpp opens.
#include "device/cpu/simd_neon.hpp"

#include "device/cpu/probe_kernel.hpp"
