// Packed quantised weights for the kernels of operators; implemented by ops/linear.
#pragma once

#include "ops/cuda/gemm_epilogue.cuh"
#include "ops/cuda/quant_decode.cuh"
#include "ops/linear/op.hpp"

namespace llaisys::ops {

// Most rows of a product that are multiplied 16 or 32 at a time.
constexpr int64_t kQuantPassRows = 64;

// A weight, and those that follow it in memory, as the operand of a kernel.
inline cuda::QuantMatrix quant_matrix_of(const LinearWeight &weight) {
    const bool has_row_scales = weight.scales.defined();
    return {reinterpret_cast<const unsigned char *>(weight.bytes.data()),
            has_row_scales ? weight.scales.as<float>() : nullptr, weight.bytes.size(1),
            quant_row_layout(weight.dtype(), has_row_scales)};
}

// Whether weight b follows weight a in memory, in the same layout.
bool is_next_quantised(const LinearWeight &a, const LinearWeight &b);

// Whether products of m rows in `dtype` read the weight as it is.
bool reads_quantised(const device::Stream &stream, const LinearWeight &weight, int64_t m,
                     DType dtype);

// out = x * weights^T for n adjacent rows of f8 weights from `weight` on, where x is quantised to
// e4m3 rows; false where that is not supported. dtype: of input.x, and of the normalized rows.
bool multiply_f8_rows(const device::Stream &stream, const cuda::GemmInput &input, DType dtype,
                      const LinearWeight &weight, int64_t n, const Tensor &out);

// The weights in `dtype`, one after another, in memory of the stream that the next call overwrites;
// false unless all are quantised and together have a moderate size. Kernels that read them must be
// launched under WithoutPdl: they load weights before the kernel before them has ended.
bool widen_quantised(const device::Stream &stream, const LinearWeight *const *weights, int count,
                     DType dtype, LinearWeight *widened);

// While it lives, kernels of the stream start after the one before has ended.
class WithoutPdl {
public:
    explicit WithoutPdl(const device::Stream &stream)
        : allows_pdl_(device::cuda_stream_of(stream).allows_pdl), before_(allows_pdl_) {
        allows_pdl_ = false;
    }
    ~WithoutPdl() { allows_pdl_ = before_; }
    WithoutPdl(const WithoutPdl &) = delete;
    WithoutPdl &operator=(const WithoutPdl &) = delete;

private:
    bool &allows_pdl_;
    bool before_;
};

} // namespace llaisys::ops
