// Quantised weights on CUDA (quant_rows.hpp): packing, products by number of rows, and conversion
// to 16 bits.
//
//   few rows                    ops/cuda/quant_gemm.cuh
//   97 and more, f8 with row scales
//                               rows of x are converted to e4m3 with a scale each, then cuBLASLt
//   up to kQuantPassRows        the same kernels for some rows at a time; batch-invariant streams:
//                               gemm_small_m_quant.cuh for any number of rows
//   more, or no kernel          the weight is converted to the dtype of the input, into memory of the
//                               stream, and multiplied as an unquantised one
#pragma once

#include "ops/linear/format.hpp"

namespace llaisys::ops {

LinearFormat::RowLayout quantised_rows_cuda;
LinearFormat::Pack pack_quantised_cuda;
LinearFormat::Run run_quantised_cuda;
LinearFormat::Rows rows_of_quantised_cuda;
decltype(linear_add) linear_add_quantised_cuda;

} // namespace llaisys::ops
