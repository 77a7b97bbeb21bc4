// Division of a grouped linear (ops/linear/op.hpp) into chunks of one parallel region. A plain linear
// is one group.
#pragma once

#include "ops/cpu/rows.hpp"
#include "ops/linear/format.hpp"

#include <vector>

namespace llaisys::ops {

// Calls body(g, i, row), on several threads if there is enough work, for row i of every group g; `row`
// is its row of `in`, of `work` element steps.
template <typename Body>
void for_group_rows(const device::Stream &stream, const Tensor &in, const int32_t *rows,
                    const LinearGroup *groups, int64_t n_groups, int64_t work, const Body &body) {
    static thread_local std::vector<int64_t> counts; // of the rows before each group, and of all
    counts.assign(1, 0);
    for (int64_t g = 0; g < n_groups; ++g) {
        counts.push_back(counts.back() + groups[g].count);
    }
    const std::vector<int64_t> &before = counts; // of the calling thread
    cpu::for_rows(stream, before.back(), work, [&](int64_t first, int64_t last) {
        const auto after = std::upper_bound(before.begin(), before.end(), first);
        for (int64_t n = first, g = after - before.begin() - 1; n < last; ++n) {
            while (n >= before[size_t(g) + 1]) {
                ++g;
            }
            const int64_t i = n - before[size_t(g)];
            const int64_t row = groups[g].first + i;
            body(g, i, cpu::row_of(in, rows != nullptr ? rows[row] : row));
        }
    });
}

// A chunk: `panels` panels of one part from first_panel on, for m rows of a group from first_row
// (within the group) on.
struct GroupChunk {
    int64_t group;
    int part;
    int64_t first_panel;
    int64_t panels;
    int64_t first_row;
    int64_t m;
};

// Sizes of the chunks of a group.
struct GroupChunkSize {
    int64_t panels;
    int64_t rows; // the last chunk may have fewer
};

// Calls body(const GroupChunk &) for all panels (of panel_rows outputs) and rows. size_of(m): the
// chunk size of a group with m > 0 rows. Panels vary fastest, so that the rows of a group stay in
// the cache while its weights stream.
template <typename SizeOf, typename Body>
void for_group_chunks(const device::Stream &stream, const LinearGroup *groups, int64_t n_groups,
                      int first_part, int n_parts, int64_t panel_rows, const SizeOf &size_of,
                      const Body &body) {
    const auto panel_chunks = [&](const LinearPart &part, int64_t panels) {
        const int64_t all = (part.weight->out_features + panel_rows - 1) / panel_rows;
        return (all + panels - 1) / panels;
    };
    const auto all_panel_chunks = [&](const LinearGroup &group, int64_t panels) {
        int64_t chunks = 0;
        for (int p = first_part; p < first_part + n_parts; ++p) {
            chunks += panel_chunks(group.parts[p], panels);
        }
        return chunks;
    };
    static thread_local std::vector<int64_t> starts; // first chunk of each group, and the end
    starts.assign(size_t(n_groups) + 1, 0);
    for (int64_t g = 0; g < n_groups; ++g) {
        int64_t chunks = 0;
        if (groups[g].count > 0) {
            const GroupChunkSize size = size_of(groups[g].count);
            chunks = all_panel_chunks(groups[g], size.panels) *
                     ((groups[g].count + size.rows - 1) / size.rows);
        }
        starts[size_t(g) + 1] = starts[size_t(g)] + chunks;
    }
    const std::vector<int64_t> &begin = starts; // of the calling thread
    device::pool_of(stream).run(begin.back(), [&](int64_t chunk, int) {
        const auto after = std::upper_bound(begin.begin(), begin.end(), chunk);
        const int64_t g = int64_t(after - begin.begin()) - 1;
        const LinearGroup &group = groups[g];
        const GroupChunkSize size = size_of(group.count);
        const int64_t per_rows = all_panel_chunks(group, size.panels);
        const int64_t inside = chunk - begin[size_t(g)];
        const int64_t first_row = inside / per_rows * size.rows;
        int64_t number = inside % per_rows;
        int part = first_part;
        while (number >= panel_chunks(group.parts[part], size.panels)) {
            number -= panel_chunks(group.parts[part], size.panels);
            ++part;
        }
        body(GroupChunk{g, part, number * size.panels, size.panels, first_row,
                        std::min(size.rows, group.count - first_row)});
    });
}

// Where a chunk writes: outputs from panel * panel_rows on. x, w and k are not set.
inline cpu::LinearTask group_task(const LinearGroup &group, const GroupChunk &chunk,
                                  int64_t panel_rows) {
    const LinearPart &part = group.parts[chunk.part];
    const int64_t first = chunk.first_panel * panel_rows;
    cpu::LinearTask task{};
    task.m = chunk.m;
    task.n = std::min(chunk.panels * panel_rows, part.weight->out_features - first);
    task.bias = part.bias != nullptr ? cpu::values_of(*part.bias, first).data : nullptr;
    task.bias_dtype = part.bias != nullptr ? part.bias->dtype() : LLAISYS_DTYPE_F32;
    const int64_t row = group.first - group.out_first + chunk.first_row;
    task.out = cpu::row_of(*part.out, row).from(first).data;
    task.out_dtype = part.out->dtype();
    task.ldo = part.out->stride(0);
    return task;
}

} // namespace llaisys::ops
