// Products with quantised weights for aarch64 with dot product instructions.
#define LLAISYS_CPU_NS cpu_neon_dotprod
#include "device/cpu/simd_neon.hpp"

#include "device/cpu/bytes_neon.hpp"

#include "ops/cpu/quant_table.hpp"
