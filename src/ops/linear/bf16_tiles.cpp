#include "ops/linear/bf16_tiles.hpp"

#include "ops/cpu/rows.hpp"
#include "ops/cpu/tile_kernels.hpp"
#include "ops/linear/groups.hpp"

namespace llaisys::ops {

namespace {

using cpu::kStrip;
using cpu::kTileK;

int64_t strips_of(int64_t out_features) { return 2 * ((out_features + 31) / 32); }
// k padded to whole tiles, at least one.
int64_t padded(int64_t k) { return std::max(cpu::round_up(k, kTileK), kTileK); }

// Index of value k of output j within its strip.
constexpr int64_t place_of(int64_t j, int64_t k) { return k / 2 * 2 * kStrip + 2 * j + k % 2; }

// The m rows of `in` in tile layout, in scratch memory.
cpu::TileRows place(const device::Stream &stream, const cpu::TileKernels &tiles, const Tensor &in,
                    const Tensor *rows, int64_t m, cpu::Scratch *scratch) {
    const int32_t *index = rows != nullptr ? rows->as<int32_t>() : nullptr;
    const int64_t k = in.size(1);
    cpu::TileRows x;
    x.height = std::min<int64_t>(m, 16);
    x.k = padded(k);
    const int64_t floats = x.row_block() * ((m + 15) / 16) / 2; // two bf16 per float
    float *memory = scratch->floats(floats + m * k);
    x.q = reinterpret_cast<bf16_t *>(memory);
    float *wide = memory + floats; // for x that is not f32
    const cpu::Kernels &kernels = cpu::kernels();
    cpu::for_rows(stream, m, k, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const std::byte *row = cpu::row_of(in, index != nullptr ? index[i] : i);
            tiles.place_row(x, i, cpu::read(kernels, row, in.dtype(), wide + i * k, k), k);
        }
    });
    return x;
}

// Division of the work: a chunk is `strips` strips of one part for `rows` rows. Strips usually come
// in pairs.
struct Plan {
    int64_t strips;
    int64_t strip_groups; // over all parts
    int64_t rows;
    int64_t row_groups;
};

int64_t groups_of(const LinearPart &part, int64_t strips) {
    const int64_t used = (part.weight->out_features + kStrip - 1) / kStrip;
    return (used + strips - 1) / strips;
}

Plan plan_of(const LinearPart *parts, int n_parts, int64_t m, int64_t k, int64_t threads) {
    // Minimum work of a chunk, so that its overhead is negligible.
    constexpr int64_t kChunkSteps = 16384;
    constexpr int64_t kChunks = 4; // per thread, for load balance
    Plan plan;
    plan.row_groups = std::max<int64_t>((m + cpu::kTileTaskRows - 1) / cpu::kTileTaskRows, 1);
    plan.rows = cpu::round_up((m + plan.row_groups - 1) / plan.row_groups, 32);
    if (m > 32) {
        int64_t pairs = 0;
        for (int p = 0; p < n_parts; ++p) {
            pairs += strips_of(parts[p].weight->out_features) / 2;
        }
        const int64_t fair = pairs * plan.row_groups / (kChunks * threads);
        plan.strips = 2 * std::clamp<int64_t>(fair, 1, cpu::kTaskPanels);
    } else {
        const int64_t steps = kStrip * std::max<int64_t>(k * m, 1); // of one strip
        const int64_t worthwhile = (kChunkSteps + steps - 1) / steps;
        plan.strips = worthwhile == 1 ? 1 : cpu::round_up(worthwhile, 2);
    }
    plan.strip_groups = 0;
    for (int p = 0; p < n_parts; ++p) {
        plan.strip_groups += groups_of(parts[p], plan.strips);
    }
    return plan;
}

// Outputs and rows of the part that a chunk computes.
cpu::LinearTask task_of(const LinearPart &part, const Plan &plan, int64_t number, int64_t first_row,
                        int64_t m) {
    const int64_t first = number * plan.strips * kStrip;
    cpu::LinearTask task{};
    task.m = std::min(plan.rows, m - first_row);
    task.k = padded(part.weight->in_features);
    task.w = part.weight->bytes.as<bf16_t>() + first * task.k;
    task.n = std::min(plan.strips * kStrip, part.weight->out_features - first);
    task.bias =
        part.bias != nullptr ? cpu::at(part.bias->data(), part.bias->dtype(), first) : nullptr;
    task.bias_dtype = part.bias != nullptr ? part.bias->dtype() : LLAISYS_DTYPE_F32;
    task.out = cpu::at(cpu::row_of(*part.out, first_row), part.out->dtype(), first);
    task.out_dtype = part.out->dtype();
    task.ldo = part.out->stride(0);
    return task;
}

} // namespace

int64_t bf16_tile_bytes(int64_t out_features, int64_t in_features) {
    return strips_of(out_features) * kStrip * padded(in_features) * int64_t(sizeof(bf16_t));
}

void pack_bf16_tiles(const device::Stream &stream, const Tensor &weight, LinearWeight *packed) {
    const int64_t n = weight.size(0);
    const int64_t k = weight.size(1);
    const int64_t strips = strips_of(n);
    packed->bytes = Tensor::create({strips, padded(k) / 2, kStrip, 2}, LLAISYS_DTYPE_BF16);
    bf16_t *bytes = packed->bytes.as<bf16_t>();
    cpu::for_rows(stream, strips, kStrip * k, [&](int64_t first, int64_t last) {
        for (int64_t row = first * kStrip; row < std::min(n, last * kStrip); ++row) {
            const bf16_t *from = weight.as<bf16_t>() + row * weight.stride(0);
            bf16_t *strip = bytes + row / kStrip * kStrip * padded(k);
            for (int64_t i = 0; i < k; ++i) {
                strip[place_of(row % kStrip, i)] = from[i];
            }
        }
    });
}

void run_bf16_tiles(const device::Stream &stream, const Tensor &in, const LinearPart *parts,
                    int n_parts, const Tensor *rows) {
    static thread_local cpu::Scratch scratch;
    const cpu::TileKernels *tiles = cpu::tile_kernels();
    ensure(tiles != nullptr, "weights that were laid out for tiles, and no tiles");
    const int64_t m = rows != nullptr ? rows->size(0) : in.size(0);
    const cpu::TileRows x = place(stream, *tiles, in, rows, m, &scratch);
    device::ThreadPool &pool = device::pool_of(stream);
    const Plan plan = plan_of(parts, n_parts, m, x.k, pool.size());
    // Strips vary fastest: the rows of x stay in the cache while the weights stream.
    pool.run(plan.strip_groups * plan.row_groups, [&](int64_t chunk, int) {
        const int64_t first_row = chunk / plan.strip_groups * plan.rows;
        if (first_row >= m) { // rows are divided in multiples of 32
            return;
        }
        int64_t number = chunk % plan.strip_groups;
        const LinearPart *part = parts;
        for (; number >= groups_of(*part, plan.strips); ++part) {
            number -= groups_of(*part, plan.strips);
        }
        tiles->linear({x.from(first_row), task_of(*part, plan, number, first_row, m)});
    });
}

void run_bf16_tile_groups(const device::Stream &stream, const Tensor &in, const int32_t *rows,
                          const LinearGroup *groups, int64_t n_groups, int first_part,
                          int n_parts) {
    static thread_local cpu::Scratch scratch;
    static thread_local std::vector<cpu::TileRows> inputs;
    const cpu::TileKernels *tiles = cpu::tile_kernels();
    ensure(tiles != nullptr, "weights that were laid out for tiles, and no tiles");
    const int64_t k = in.size(1);
    inputs.resize(size_t(n_groups));
    int64_t floats = 0;
    for (int64_t g = 0; g < n_groups; ++g) {
        cpu::TileRows &x = inputs[size_t(g)];
        x.height = std::min<int64_t>(groups[g].count, 16);
        x.k = padded(k);
        floats += cpu::round_up(x.row_block() * ((groups[g].count + 15) / 16) / 2, 16);
    }
    const int64_t threads = device::pool_of(stream).size();
    const int64_t lanes = std::min(n_groups, threads * 4);
    float *memory = scratch.floats(floats + lanes * k);
    float *next = memory + lanes * k;
    for (int64_t g = 0; g < n_groups; ++g) {
        cpu::TileRows &x = inputs[size_t(g)];
        x.q = reinterpret_cast<bf16_t *>(next);
        next += cpu::round_up(x.row_block() * ((groups[g].count + 15) / 16) / 2, 16);
    }
    const std::vector<cpu::TileRows> &placed = inputs; // of the calling thread
    const cpu::Kernels &kernels = cpu::kernels();
    device::pool_of(stream).run(lanes, [&](int64_t lane, int) {
        for (int64_t g = n_groups * lane / lanes; g < n_groups * (lane + 1) / lanes; ++g) {
            for (int64_t i = 0; i < groups[g].count; ++i) {
                const int64_t at = groups[g].first + i;
                const std::byte *row = cpu::row_of(in, rows != nullptr ? rows[at] : at);
                const float *values = cpu::read(kernels, row, in.dtype(), memory + lane * k, k);
                tiles->place_row(placed[size_t(g)], i, values, k);
            }
        }
    });
    const auto size_of = [&](int64_t count) {
        constexpr int64_t kChunkSteps = 16384;
        const int64_t steps = kStrip * std::max<int64_t>(k * count, 1); // of one strip
        const int64_t strips = (kChunkSteps + steps - 1) / steps;
        const int64_t even = count > 32 ? 2 * cpu::kTaskPanels : cpu::round_up(strips, 2);
        return GroupChunkSize{count <= 32 && strips == 1 ? 1 : even, cpu::kTileTaskRows / 32 * 32};
    };
    for_group_chunks(stream, groups, n_groups, first_part, n_parts, kStrip, size_of,
                     [&](const GroupChunk &chunk) {
                         const LinearGroup &group = groups[chunk.group];
                         const LinearWeight &weight = *group.parts[chunk.part].weight;
                         cpu::LinearTask task = group_task(group, chunk, kStrip);
                         task.k = padded(k);
                         task.w = weight.bytes.as<bf16_t>() + chunk.first_panel * kStrip * task.k;
                         tiles->linear({placed[size_t(chunk.group)].from(chunk.first_row), task});
                     });
}

void rows_of_bf16_tiles(const device::Stream &stream, const Tensor &out, const Tensor &index,
                        const LinearWeight &weight) {
    const int64_t k = weight.in_features;
    const bf16_t *bytes = weight.bytes.as<bf16_t>();
    cpu::for_rows(stream, out.size(0), k, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const int64_t row = index.as<int64_t>()[i];
            const bf16_t *strip = bytes + row / kStrip * kStrip * padded(k);
            visit_real(out.dtype(), [&](auto to) {
                using To = decltype(to);
                To *values = out.as<To>() + i * k;
                for (int64_t j = 0; j < k; ++j) {
                    values[j] = from_f32<To>(to_f32(strip[place_of(row % kStrip, j)]));
                }
            });
        }
    });
}

} // namespace llaisys::ops
