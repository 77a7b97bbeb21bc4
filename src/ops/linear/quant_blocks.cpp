#include "ops/linear/quant_blocks.hpp"

namespace llaisys::ops {

namespace {

[[noreturn]] void no_blocks(DType dtype) {
    fail(LLAISYS_ERROR_INVALID, "dtype must be quantised, got ", name_of(dtype));
}

} // namespace

const cpu::QuantLayout &quant_layout_of(DType dtype) {
    switch (dtype) {
    case LLAISYS_DTYPE_Q8_0:
    case LLAISYS_DTYPE_IQ4_NL: // its values are bytes
        return cpu::kQ8_0;
    case LLAISYS_DTYPE_Q4_0:
        return cpu::kQ4_0;
    case LLAISYS_DTYPE_Q4_1:
        return cpu::kQ4_1;
    case LLAISYS_DTYPE_Q5_0:
        return cpu::kQ5_0;
    case LLAISYS_DTYPE_Q5_1:
        return cpu::kQ5_1;
    case LLAISYS_DTYPE_Q4_K:
        return cpu::kQ4_K;
    case LLAISYS_DTYPE_Q5_K:
        return cpu::kQ5_K;
    case LLAISYS_DTYPE_Q6_K:
        return cpu::kQ6_K;
    case LLAISYS_DTYPE_Q2_K:
        return cpu::kQ2_K;
    case LLAISYS_DTYPE_Q3_K:
        return cpu::kQ3_K;
    case LLAISYS_DTYPE_I4_G32:
        return cpu::kI4_G32;
    case LLAISYS_DTYPE_I4_G128:
        return cpu::kI4_G128;
    case LLAISYS_DTYPE_I8_G32:
        return cpu::kI8_G32;
    case LLAISYS_DTYPE_I8_G128:
        return cpu::kI8_G128;
    default:
        no_blocks(dtype);
    }
}

void read_block(DType dtype, const std::byte *block, QuantBlock *out) {
    if (!try_read_block(dtype, block, out)) {
        no_blocks(dtype);
    }
}

} // namespace llaisys::ops
