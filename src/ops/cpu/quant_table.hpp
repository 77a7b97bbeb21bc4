// Included by each quant_kernels_<isa>.cpp: compiles every format for it and defines its table.
#pragma once

#include "ops/cpu/quant_activations.hpp"
#include "ops/cpu/quant_kernel.hpp"

namespace llaisys::LLAISYS_CPU_NS {

// Format parameter of the functions of quant_kernel.hpp.
template <const QuantLayout &of> struct LayoutFormat {
    static constexpr QuantLayout layout = of;
};

// The product function; replaced where tiles are used.
#ifndef LLAISYS_QUANT_PRODUCT
#define LLAISYS_QUANT_PRODUCT quant_linear
#endif

#define LLAISYS_TEXT_OF(name) #name
#define LLAISYS_NAME_OF(name) LLAISYS_TEXT_OF(name)

constexpr ops::cpu::QuantKernels make_quant_kernels() {
    ops::cpu::QuantKernels table{};
    table.name = LLAISYS_NAME_OF(LLAISYS_CPU_NS) + sizeof "cpu_" - 1;
    table.byte_offset = kByteOffset;
    table.quantise = quantise_row;
    table.q8_0 = LLAISYS_QUANT_PRODUCT<LayoutFormat<ops::cpu::kQ8_0>>;
    table.q4_0 = LLAISYS_QUANT_PRODUCT<LayoutFormat<ops::cpu::kQ4_0>>;
    table.q4_1 = LLAISYS_QUANT_PRODUCT<LayoutFormat<ops::cpu::kQ4_1>>;
    table.q5_0 = LLAISYS_QUANT_PRODUCT<LayoutFormat<ops::cpu::kQ5_0>>;
    table.q5_1 = LLAISYS_QUANT_PRODUCT<LayoutFormat<ops::cpu::kQ5_1>>;
    table.q4_k = LLAISYS_QUANT_PRODUCT<LayoutFormat<ops::cpu::kQ4_K>>;
    table.q5_k = LLAISYS_QUANT_PRODUCT<LayoutFormat<ops::cpu::kQ5_K>>;
    table.q6_k = LLAISYS_QUANT_PRODUCT<LayoutFormat<ops::cpu::kQ6_K>>;
    table.q2_k = LLAISYS_QUANT_PRODUCT<LayoutFormat<ops::cpu::kQ2_K>>;
    table.q3_k = LLAISYS_QUANT_PRODUCT<LayoutFormat<ops::cpu::kQ3_K>>;
    table.i4_g32 = LLAISYS_QUANT_PRODUCT<LayoutFormat<ops::cpu::kI4_G32>>;
    table.i4_g128 = LLAISYS_QUANT_PRODUCT<LayoutFormat<ops::cpu::kI4_G128>>;
    table.i8_g32 = LLAISYS_QUANT_PRODUCT<LayoutFormat<ops::cpu::kI8_G32>>;
    table.i8_g128 = LLAISYS_QUANT_PRODUCT<LayoutFormat<ops::cpu::kI8_G128>>;
    return table;
}

extern const ops::cpu::QuantKernels quant_kernels;
constexpr ops::cpu::QuantKernels quant_kernels = make_quant_kernels();

} // namespace llaisys::LLAISYS_CPU_NS
