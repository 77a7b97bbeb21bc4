// Products with quantised weights for AVX2.
#include "device/cpu/simd_avx2.hpp"

#include "device/cpu/bytes_avx2.hpp"

#include "ops/cpu/quant_table.hpp"
