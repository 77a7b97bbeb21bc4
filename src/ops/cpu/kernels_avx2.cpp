// The kernels for avx2. Everything is in the namespace that simd_avx2.hpp opens.
#include "device/cpu/simd_avx2.hpp"

#include "ops/cpu/attention_transposed_keys.hpp"
#include "ops/cpu/kernel_table.hpp"
