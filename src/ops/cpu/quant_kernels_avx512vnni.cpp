// Products with quantised weights for AVX-512 with VNNI.
#define LLAISYS_CPU_NS cpu_avx512vnni
#include "device/cpu/simd_avx512.hpp"

#include "device/cpu/bytes_avx512vnni.hpp"

#include "ops/cpu/quant_table.hpp"
