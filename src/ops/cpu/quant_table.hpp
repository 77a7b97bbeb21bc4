// Included by each quant_kernels_<isa>.cpp: compiles every format for it and defines its table.
#pragma once

#include "ops/cpu/quant_activations.hpp"
#include "ops/cpu/quant_kernel.hpp"

#include <utility>

namespace llaisys::LLAISYS_CPU_NS {

// The product function; replaced where tiles are used.
#ifndef LLAISYS_QUANT_PRODUCT
#define LLAISYS_QUANT_PRODUCT quant_linear
#endif

template <size_t... formats>
constexpr ops::cpu::QuantKernels make_quant_kernels(std::index_sequence<formats...>) {
    return {kByteOffset, quantise_row, {LLAISYS_QUANT_PRODUCT<LayoutFormat<formats>>...}};
}

extern const ops::cpu::QuantKernels quant_kernels;
constexpr ops::cpu::QuantKernels quant_kernels =
    make_quant_kernels(std::make_index_sequence<ops::cpu::kQuantFormatCount>());

} // namespace llaisys::LLAISYS_CPU_NS
