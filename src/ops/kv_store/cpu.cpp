#include "ops/kv_store/op.hpp"

#include "ops/cpu/rows.hpp"

namespace llaisys::ops {

namespace {

enum class Direction { store, load };

// Rows of other values in an 8-bit cache: one scale per head, after its bytes.
template <Direction direction>
void move_quantised(const device::Stream &stream, const Tensor &cache, const Tensor &rows,
                    const Tensor &slots) {
    const int64_t heads = rows.size(1);
    const int64_t d = rows.size(2);
    const cpu::Kernels &kernels = cpu::kernels();
    cpu::for_rows(stream, rows.size(0), heads * d, [&](int64_t first, int64_t last) {
        float buffer[kMaxQuantisedHead];
        for (int64_t i = first; i < last; ++i) {
            int8_t *cell = cache.as<int8_t>() + slots.as<int32_t>()[i] * cache.stride(0);
            for (int64_t h = 0; h < heads; ++h, cell += cache.stride(1)) {
                const cpu::Values row = cpu::row_of(rows, i, h);
                if constexpr (direction == Direction::store) {
                    const float scale =
                        kernels.quantise(cell, cpu::read(kernels, row, buffer, d), d);
                    std::memcpy(cell + d, &scale, sizeof scale);
                } else {
                    float scale;
                    std::memcpy(&scale, cell + d, sizeof scale);
                    float *values = cpu::target(row, buffer);
                    kernels.dequantise(values, cell, scale, d);
                    cpu::finish(kernels, row, values, d);
                }
            }
        }
    });
}

template <Direction direction>
void move(const device::Stream &stream, const Tensor &cache, const Tensor &rows,
          const Tensor &slots) {
    if (cache.dtype() == LLAISYS_DTYPE_I8 && rows.dtype() != LLAISYS_DTYPE_I8) {
        return move_quantised<direction>(stream, cache, rows, slots);
    }
    const int64_t heads = cache.size(1);
    const int64_t d = cache.size(2);
    const cpu::Kernels &kernels = cpu::kernels();
    const bool is_dense = rows.stride(1) == d || heads == 1;
    cpu::for_rows(stream, rows.size(0), heads * d, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const cpu::Values cell = cpu::row_of(cache, slots.as<int32_t>()[i]);
            for (int64_t h = 0; h < (is_dense ? 1 : heads); ++h) {
                const cpu::Values row = cpu::row_of(rows, i, h), of_cell = cell.from(h * d);
                const int64_t n = is_dense ? heads * d : d;
                direction == Direction::store ? cpu::convert(kernels, of_cell, row, n)
                                              : cpu::convert(kernels, row, of_cell, n);
            }
        }
    });
}

} // namespace

void kv_store_cpu(const device::Stream &stream, const KvLayer &kv, const Tensor &k, const Tensor *v,
                  const Tensor &slots) {
    move<Direction::store>(stream, kv.k, k, slots);
    if (v != nullptr) {
        move<Direction::store>(stream, kv.v, *v, slots);
    }
}

void kv_load_cpu(const device::Stream &stream, const Tensor &k, const Tensor *v, const KvLayer &kv,
                 const Tensor &slots) {
    move<Direction::load>(stream, kv.k, k, slots);
    if (v != nullptr) {
        move<Direction::load>(stream, kv.v, *v, slots);
    }
}

void kv_blocks_cpu(const device::Stream &stream, KvDirection direction, const KvLayer &kv,
                   int64_t block_size, const KvHost &host, const int32_t *blocks,
                   const int32_t *host_slots, int64_t n) {
    const int64_t width = block_size * kv.k.stride(0);
    const size_t bytes = size_t(width * cpu::bytes_of_one(kv.k.dtype()));
    cpu::for_rows(stream, n, 2 * width, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            std::byte *slot = host.data + host_slots[i] * host.slot_stride_bytes;
            for (const Tensor *cache : {&kv.k, &kv.v}) {
                if (!cache->defined()) {
                    continue; // the keys contain the values
                }
                std::byte *block = cpu::row_of(*cache, blocks[i] * block_size).data;
                if (direction == KvDirection::to_host) {
                    std::memcpy(slot, block, bytes);
                } else {
                    std::memcpy(block, slot, bytes);
                }
                slot += bytes;
            }
        }
    });
}

} // namespace llaisys::ops
