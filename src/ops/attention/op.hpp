// Attention over slot lists: block tables, or cell lists as tables with blocks of one. Contract:
// llaisysAttention in include/llaisys/ops.h.
#pragma once

#include "ops/kv_layer.hpp"

namespace llaisys::ops {

// Which entries of which list each query token sees; all on the device of the queries.
struct AttentionLists {
    Tensor q_rows; // i32 [n]: row of tables
    Tensor begin;  // i32 [n]: first entry seen
    Tensor end;    // i32 [n]: one past the last entry seen
    Tensor tables; // i32 [rows, width]: block numbers; entries past a list's end are not read
    int32_t block_size = 1;
};

void attention(const device::Stream &stream, const Tensor &out, const Tensor &q, const KvLayer &kv,
               const AttentionLists &lists, float scale);

} // namespace llaisys::ops
