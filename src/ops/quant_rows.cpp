#include "ops/quant_rows.hpp"

namespace llaisys::ops {

QuantRowLayout quant_row_layout(DType dtype, bool has_row_scales) {
    switch (dtype) {
    case LLAISYS_DTYPE_Q4_0:
    case LLAISYS_DTYPE_Q4_1:
    case LLAISYS_DTYPE_Q4_K:
    case LLAISYS_DTYPE_I4_G32:
        return {QuantCodes::int4, 32, 4};
    case LLAISYS_DTYPE_I4_G128:
        return {QuantCodes::int4, 128, 4};
    case LLAISYS_DTYPE_Q2_K:
    case LLAISYS_DTYPE_Q3_K:
        return {QuantCodes::int4, 16, 4};
    case LLAISYS_DTYPE_Q8_0:
    case LLAISYS_DTYPE_Q5_0:
    case LLAISYS_DTYPE_IQ4_NL:
        return {QuantCodes::int8, 32, 2};
    case LLAISYS_DTYPE_Q6_K:
        return {QuantCodes::int8, 16, 2};
    case LLAISYS_DTYPE_Q5_1:
    case LLAISYS_DTYPE_Q5_K:
    case LLAISYS_DTYPE_I8_G32:
        return {QuantCodes::int8, 32, 4};
    case LLAISYS_DTYPE_I8_G128:
        return {QuantCodes::int8, 128, 4};
    case LLAISYS_DTYPE_F8_G128:
        return {QuantCodes::f8, 128, has_row_scales ? 0 : 2};
    default:
        fail(LLAISYS_ERROR_INVALID, "dtype must be quantised, got ", name_of(dtype));
    }
}

} // namespace llaisys::ops
