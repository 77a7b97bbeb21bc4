// Products with quantised weights for aarch64 without dot product instructions.
#include "device/cpu/simd_neon.hpp"

#include "device/cpu/bytes_neon.hpp"

#include "ops/cpu/quant_table.hpp"
