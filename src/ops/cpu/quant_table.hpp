// Included by each quant_kernels_<isa>.cpp: compiles every format for it and defines its table.
#pragma once

#include "ops/cpu/quant_kernel.hpp"

namespace llaisys::LLAISYS_CPU_NS {

#define LLAISYS_TEXT_OF(name) #name
#define LLAISYS_NAME_OF(name) LLAISYS_TEXT_OF(name)

constexpr ops::cpu::QuantKernels make_quant_kernels() {
    ops::cpu::QuantKernels table{};
    table.name = LLAISYS_NAME_OF(LLAISYS_CPU_NS) + sizeof "cpu_" - 1;
    table.byte_offset = kByteOffset;
    table.quantise = quantise_row;
    table.q8_0 = quant_linear<FormatQ8_0>;
    table.q4_0 = quant_linear<FormatQ4_0>;
    table.q4_1 = quant_linear<FormatQ4_1>;
    table.q5_0 = quant_linear<FormatQ5_0>;
    table.q5_1 = quant_linear<FormatQ5_1>;
    table.q4_k = quant_linear<FormatQ4_K>;
    table.q5_k = quant_linear<FormatQ5_K>;
    table.q6_k = quant_linear<FormatQ6_K>;
    return table;
}

extern const ops::cpu::QuantKernels quant_kernels;
constexpr ops::cpu::QuantKernels quant_kernels = make_quant_kernels();

} // namespace llaisys::LLAISYS_CPU_NS
