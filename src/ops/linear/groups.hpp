// Division of a grouped linear (ops/linear/op.hpp) into chunks of one parallel region. A plain linear
// is one group.
#pragma once

#include "ops/cpu/rows.hpp"
#include "ops/linear/format.hpp"

#include <iterator>
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

// Up to so many rows, products are bound by reading the weights, which long runs make faster.
constexpr int64_t kStreamRows = 32;

// Sizes of the chunks of a group.
struct GroupChunkSize {
    int64_t panels;
    int64_t rows; // the last chunk may have fewer
};

// The weights of a plain linear, for ThreadPool::announce; nothing of other ones, whose groups vary.
inline device::Reads weights_of(const LinearGroup *groups, int64_t n_groups, int first_part,
                                int n_parts) {
    device::Reads reads;
    if (n_groups == 1 && n_parts <= device::Reads::kRanges) {
        for (int p = 0; p < n_parts; ++p) {
            const Tensor &bytes = groups[0].parts[first_part + p].weight->bytes;
            reads.begin[p] = bytes.data();
            reads.bytes[p] = bytes_of(bytes.dtype(), bytes.elements());
        }
    }
    return reads;
}

// Calls body(const GroupChunk &) for all panels (of panel_rows outputs) and rows. size_of(m): the
// chunk size of a group with m > 0 rows; with up to kStreamRows of them, body gets several adjacent
// chunks as one. Panels vary fastest, so that the rows of a group stay in the cache while its weights
// stream.
template <typename SizeOf, typename Body>
void for_group_chunks(const device::Stream &stream, const LinearGroup *groups, int64_t n_groups,
                      int first_part, int n_parts, int64_t panel_rows, const SizeOf &size_of,
                      const Body &body) {
    const auto panel_chunks = [&](const LinearPart &part, int64_t panels) {
        const int64_t all = (part.weight->out_features + panel_rows - 1) / panel_rows;
        return (all + panels - 1) / panels;
    };
    struct Plan {
        int64_t group;
        int64_t first_chunk;
        GroupChunkSize size;
        int64_t panel_chunks; // of all parts
    };
    static thread_local std::vector<Plan> kept; // of the groups that have rows
    kept.clear();
    int64_t n_chunks = 0;
    int64_t most_rows = 0; // of a group
    for (int64_t g = 0; g < n_groups; ++g) {
        if (groups[g].count == 0) {
            continue;
        }
        most_rows = std::max(most_rows, groups[g].count);
        Plan plan{g, n_chunks, size_of(groups[g].count), 0};
        for (int p = first_part; p < first_part + n_parts; ++p) {
            plan.panel_chunks += panel_chunks(groups[g].parts[p], plan.size.panels);
        }
        kept.push_back(plan);
        n_chunks += plan.panel_chunks * ((groups[g].count + plan.size.rows - 1) / plan.size.rows);
    }
    const std::vector<Plan> &plans = kept; // of the calling thread
    const auto run = [&](int64_t first, int64_t last) {
        const auto is_before = [](int64_t at, const Plan &plan) { return at < plan.first_chunk; };
        while (first < last) {
            const Plan &plan =
                *std::prev(std::upper_bound(plans.begin(), plans.end(), first, is_before));
            const LinearGroup &group = groups[plan.group];
            const int64_t inside = first - plan.first_chunk;
            const int64_t first_row = inside / plan.panel_chunks * plan.size.rows;
            int64_t number = inside % plan.panel_chunks;
            int part = first_part;
            int64_t chunks = panel_chunks(group.parts[part], plan.size.panels); // of the part
            for (; number >= chunks; ++part) {
                number -= chunks;
                chunks = panel_chunks(group.parts[part + 1], plan.size.panels);
            }
            const int64_t n = std::min(last - first, chunks - number);
            body(GroupChunk{plan.group, part, number * plan.size.panels, n * plan.size.panels,
                            first_row, std::min(plan.size.rows, group.count - first_row)});
            first += n;
        }
    };
    device::ThreadPool &pool = device::pool_of(stream);
    pool.announce(weights_of(groups, n_groups, first_part, n_parts));
    if (most_rows <= kStreamRows) {
        pool.run_ranges(n_chunks, [&](int64_t first, int64_t last, int) { run(first, last); });
    } else {
        pool.run(n_chunks, [&](int64_t chunk, int) { run(chunk, chunk + 1); });
    }
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
