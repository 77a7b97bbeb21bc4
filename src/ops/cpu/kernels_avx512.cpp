// The kernels for avx512. Everything is in the namespace that simd_avx512.hpp opens.
#include "device/cpu/simd_avx512.hpp"

#include "ops/cpu/attention_transposed_keys.hpp"
#include "ops/cpu/kernel_table.hpp"
