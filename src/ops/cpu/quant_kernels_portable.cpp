// Products with quantised weights for any machine.
#include "device/cpu/simd_portable.hpp"

#include "device/cpu/bytes_portable.hpp"

#include "ops/cpu/quant_table.hpp"
