#include "ops/lora/op.hpp"

#include "ops/cpu/rows.hpp"

#include <cstring>

namespace llaisys::ops {

namespace {

using cpu::LoraTask;

constexpr int64_t kRankBlock = 16; // ranks of a shrink task
constexpr int64_t kColumns = 512;  // outputs of an expand task

// Adds to columns [first, first + task.n) of 16-bit rows: one row at a time, widened.
void expand_narrow(const cpu::Kernels &kernels, DType dtype, const Tensor &out, int64_t first,
                   LoraTask task) {
    float wide[kColumns];
    const int32_t zero = 0;
    const int32_t *rows = task.rows;
    const int64_t m = task.m;
    task.m = 1;
    task.rows = &zero;
    task.out = wide;
    task.ldo = kColumns;
    for (int64_t i = 0; i < m; ++i, task.t += task.ldt) {
        const cpu::Values row = cpu::row_of(out, rows[i]).from(first);
        cpu::read(kernels, row, wide, task.n);
        kernels.lora_expand.run(dtype, task);
        cpu::finish(kernels, row, wide, task.n);
    }
}

} // namespace

void lora_cpu(const device::Stream &stream, const Tensor &in, const LoraPart *parts, int n_parts,
              const LoraRows &rows, const Tensor &scratch) {
    const cpu::Kernels &kernels = cpu::kernels();
    const int64_t m = in.size(0);
    const int64_t k = in.size(1);
    const LoraWeight &weight = *parts[0].weight;
    const int64_t max_rank = weight.max_rank();
    const DType dtype = weight.a.dtype();
    const int32_t *order = rows.rows.as<int32_t>();
    const int64_t n_tiles = rows.tiles.as<int32_t>()[0];
    const auto *tiles = reinterpret_cast<const LoraTile *>(rows.tiles.as<int32_t>()) + 1;
    if (n_tiles == 0) {
        return;
    }
    const int64_t n_rows = tiles[n_tiles - 1].first + tiles[n_tiles - 1].count;
    const float *x = in.as<float>();
    int64_t ldx = in.stride(0);
    static thread_local cpu::Scratch wide;
    if (in.dtype() != LLAISYS_DTYPE_F32) {
        float *values = wide.floats(m * k);
        cpu::for_rows(stream, m, k, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) {
                cpu::convert(kernels, cpu::values_of(values + i * k), cpu::row_of(in, i), k);
            }
        });
        x = values;
        ldx = k;
    }
    // The task of a tile and a part; its t is scratch [n_parts, m, max_rank] in the order of rows.
    const auto task_of = [&](int64_t tile, int part, LoraTask *task) {
        const LoraTile &t = tiles[tile];
        const auto *slot = parts[part].weight->slots.as<int32_t>() + 2 * t.slot;
        *task = {};
        task->m = t.count;
        task->rank = slot[0];
        std::memcpy(&task->scale, &slot[1], sizeof task->scale);
        task->rows = order + t.first;
        task->t = scratch.as<float>() + (part * m + t.first) * max_rank;
        task->ldt = max_rank;
        return t.slot;
    };
    const int64_t rank_blocks = (max_rank + kRankBlock - 1) / kRankBlock;
    const int64_t rows_per_tile = (n_rows + n_tiles - 1) / n_tiles;
    cpu::for_rows(stream, n_tiles * n_parts * rank_blocks, rows_per_tile * kRankBlock * k / 4,
                  [&](int64_t begin, int64_t end) {
                      for (int64_t i = begin; i < end; ++i) {
                          const int64_t r = i % rank_blocks * kRankBlock;
                          const int part = int(i / rank_blocks % n_parts);
                          LoraTask task;
                          const int64_t slot = task_of(i / rank_blocks / n_parts, part, &task);
                          if (r >= task.rank) {
                              continue;
                          }
                          task.rank = std::min(kRankBlock, task.rank - r);
                          task.n = k;
                          task.x = x;
                          task.ldx = ldx;
                          task.w =
                              cpu::values_of(parts[part].weight->a, (slot * max_rank + r) * k).data;
                          task.ldw = k;
                          task.t += r;
                          kernels.lora_shrink.run(dtype, task);
                      }
                  });
    int64_t ends[kMaxLoraParts]; // of the column blocks of each part
    int64_t column_blocks = 0;
    for (int p = 0; p < n_parts; ++p) {
        column_blocks += (parts[p].out->size(1) + kColumns - 1) / kColumns;
        ends[p] = column_blocks;
    }
    cpu::for_rows(stream, n_tiles * column_blocks, rows_per_tile * kColumns * kRankBlock / 4,
                  [&](int64_t begin, int64_t end) {
                      for (int64_t i = begin; i < end; ++i) {
                          int part = 0;
                          while (i % column_blocks >= ends[part]) {
                              ++part;
                          }
                          const int64_t block = i % column_blocks - (part > 0 ? ends[part - 1] : 0);
                          const Tensor &out = *parts[part].out;
                          LoraTask task;
                          const int64_t slot = task_of(i / column_blocks, part, &task);
                          if (task.rank == 0) {
                              continue;
                          }
                          const int64_t first = block * kColumns;
                          task.n = std::min(kColumns, out.size(1) - first);
                          task.w = cpu::values_of(parts[part].weight->b,
                                                  slot * max_rank * out.size(1) + first)
                                       .data;
                          task.ldw = out.size(1);
                          if (out.dtype() != LLAISYS_DTYPE_F32) {
                              expand_narrow(kernels, dtype, out, first, task);
                              continue;
                          }
                          task.out = out.as<float>() + first;
                          task.ldo = out.stride(0);
                          kernels.lora_expand.run(dtype, task);
                      }
                  });
}

} // namespace llaisys::ops
