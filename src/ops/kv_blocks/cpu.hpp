// CPU implementation of kv_blocks. Arguments are checked by op.cpp.
#pragma once

#include "ops/kv_blocks/op.hpp"

namespace llaisys::ops {

void kv_blocks_cpu(const device::Stream &stream, KvDirection direction, const KvLayer &kv,
                   int64_t block_size, const KvHost &host, const int32_t *blocks,
                   const int32_t *host_slots, int64_t n);

} // namespace llaisys::ops
