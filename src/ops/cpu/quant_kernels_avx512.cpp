// Products with quantised weights for AVX-512 without VNNI.
#include "device/cpu/simd_avx512.hpp"

#include "device/cpu/bytes_avx512.hpp"

#include "ops/cpu/quant_table.hpp"
