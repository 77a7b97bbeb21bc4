// The kernels for neon. Everything is in the namespace that simd_neon.hpp opens.
#include "device/cpu/simd_neon.hpp"

#include "ops/cpu/attention_plain_keys.hpp"
#include "ops/cpu/kernel_table.hpp"
