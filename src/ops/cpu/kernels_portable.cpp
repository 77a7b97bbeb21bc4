// The kernels for portable. Everything is in the namespace that simd_portable.hpp opens.
#include "device/cpu/simd_portable.hpp"

#include "ops/cpu/attention_plain_keys.hpp"
#include "ops/cpu/kernel_table.hpp"
