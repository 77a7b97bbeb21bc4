// What a draw needs of whole rows of logits, for devices whose rows are not the host's. The maths is
// base/drawing.hpp and docs/sampling.md; the results are those of runtime/runner/sampler_math.cpp, bit
// for bit. A CPU draws where its rows are: these are for other devices alone.
#pragma once

#include "device/runtime.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::ops {

// By row r of the draw; all on the device, contiguous.
struct RowAdjustments {
    Tensor rows;            // i32 [n]: row of logits
    Tensor mask_rows;       // i32 [n]: row of masks; -1: all tokens are allowed
    Tensor masks;           // i32 [.., ceil(vocabulary / 32)]: bits
    Tensor bias_offsets;    // i32 [n + 1] into the two below
    Tensor bias_ids;        // i32, rising in each row; equal ones are added in their order
    Tensor bias_values;     // f32
    Tensor history_offsets; // i32 [n + 1] into the two below
    Tensor history_tokens;  // i32, rising in each row, none twice
    Tensor history_drawn;   // i32: how often each was drawn
    Tensor penalties;       // f32 [n, 3]: repetition, presence, frequency
};

// out f32 [n, vocabulary] = the rows of logits f32 [.., vocabulary] after mask, bias and penalties.
void adjust_rows(const device::Stream &stream, const Tensor &out, const Tensor &logits,
                 const RowAdjustments &adjustments);

// The weights of rows of logits f32 [.., vocabulary], given their k best f32 [.., k], largest first:
// sums i64 [n], the bits of the double that weigh() returns, 0 when all is -inf.
// rows i32 [n]; not defined: row r is r. temperatures f32 [n], above 0; not defined: 1. uniforms i64
// [n], the bits of doubles in [0, 1), with picks i32 [n]: the index that pick() gives, -1 for none;
// neither is defined where none is wanted.
void weigh_rows(const device::Stream &stream, const Tensor &sums, const Tensor &picks,
                const Tensor &logits, const Tensor &best, const Tensor &rows,
                const Tensor &temperatures, const Tensor &uniforms);

} // namespace llaisys::ops
