// The probes for portable. Everything is in the namespace that simd_portable.hpp opens.
#include "device/cpu/simd_portable.hpp"

#include "device/cpu/probe_kernel.hpp"
