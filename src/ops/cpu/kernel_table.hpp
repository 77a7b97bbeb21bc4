// Included by each kernels_<isa>.cpp: compiles every kernel for it and defines its table.
#pragma once

#include "device/cpu/simd.hpp"
#include "ops/cpu/attention_real_values.hpp"

#include "ops/cpu/attention_kernel.hpp"
#include "ops/cpu/kernels.hpp"
#include "ops/cpu/linear_kernel.hpp"
#include "ops/cpu/lora_kernel.hpp"
#include "ops/cpu/row_kernels.hpp"

namespace llaisys::LLAISYS_CPU_NS {

constexpr ops::cpu::Kernels make_table() {
    ops::cpu::Kernels table{};
    table.isa = kIsa;
    table.widen_f16 = convert_row<float, f16_t>;
    table.widen_bf16 = convert_row<float, bf16_t>;
    table.narrow_f16 = convert_row<f16_t, float>;
    table.narrow_bf16 = convert_row<bf16_t, float>;
    table.quantise = quantise_row;
    table.dequantise = dequantise_row;
    table.add = add_rows;
    table.swiglu = swiglu_row;
    table.geglu = geglu_row;
    table.geglu_erf = geglu_erf_row;
    table.scale = scale_row;
    table.scale_in_place = scale_in_place;
    table.soft_cap = soft_cap_row;
    table.sum_squares = sum_squares;
    table.max = max_of;
    table.find_equal = find_equal;
    table.find_greater = find_greater;
    table.angles = angles;
    table.rotate = rotate;
    table.linear = {linear<float>, linear<f16_t>, linear<bf16_t>};
    table.lora_shrink = {lora_shrink<float>, lora_shrink<f16_t>, lora_shrink<bf16_t>};
    table.lora_expand = {lora_expand<float>, lora_expand<f16_t>, lora_expand<bf16_t>};
    table.attention_span = attention_span;
    table.attention_merge = attention_merge;
    return table;
}

// constexpr: no code of this file runs before the table is selected for the machine.
extern const ops::cpu::Kernels kernels;
constexpr ops::cpu::Kernels kernels = make_table();

} // namespace llaisys::LLAISYS_CPU_NS
