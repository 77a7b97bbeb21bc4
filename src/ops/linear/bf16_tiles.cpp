#include "ops/linear/cpu.hpp"

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

// Floats of a group's rows in tile layout: two bf16 each.
int64_t floats_of(const cpu::TileRows &x, int64_t count) {
    return cpu::round_up(x.row_block() * ((count + 15) / 16) / 2, 16);
}

int64_t row_groups_of(int64_t m) { return (m + cpu::kTileTaskRows - 1) / cpu::kTileTaskRows; }

// Strips and rows of a chunk of m rows; strips usually come in pairs. `fair`: pairs of strips of a
// chunk for load balance.
GroupChunkSize chunk_size(int64_t k, int64_t m, int64_t fair) {
    // Minimum work of a chunk, so that its overhead is negligible.
    constexpr int64_t kChunkSteps = 16384;
    const int64_t rows = cpu::round_up((m + row_groups_of(m) - 1) / row_groups_of(m), 32);
    if (m > 32) {
        return {2 * std::clamp<int64_t>(fair, 1, cpu::kTaskPanels), rows};
    }
    const int64_t steps = kStrip * std::max<int64_t>(k * m, 1); // of one strip
    const int64_t worthwhile = (kChunkSteps + steps - 1) / steps;
    return {worthwhile == 1 ? 1 : cpu::round_up(worthwhile, 2), rows};
}

// Pairs of strips of a chunk that divide the work of all groups evenly.
int64_t fair_pairs(const LinearGroup *groups, int64_t n_groups, int first_part, int n_parts,
                   int64_t threads) {
    constexpr int64_t kChunks = 4; // per thread
    int64_t pairs = 0;
    for (int64_t g = 0; g < n_groups; ++g) {
        for (int p = first_part; p < first_part + n_parts; ++p) {
            pairs += strips_of(groups[g].parts[p].weight->out_features) / 2 *
                     row_groups_of(groups[g].count);
        }
    }
    return pairs / (kChunks * threads);
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

void run_bf16_tiles(const device::Stream &stream, const Tensor &in, const int32_t *rows,
                    const LinearGroup *groups, int64_t n_groups, int first_part, int n_parts) {
    static thread_local cpu::Scratch scratch;
    static thread_local std::vector<cpu::TileRows> inputs;
    const cpu::TileKernels *tiles = cpu::tile_kernels();
    ensure(tiles != nullptr, "weights that were laid out for tiles, and no tiles");
    const int64_t k = in.size(1);
    inputs.resize(size_t(n_groups));
    int64_t floats = 0;
    int64_t end = 0; // of the rows
    for (int64_t g = 0; g < n_groups; ++g) {
        inputs[size_t(g)] = {nullptr, std::min<int64_t>(groups[g].count, 16), padded(k)};
        floats += floats_of(inputs[size_t(g)], groups[g].count);
        end = std::max(end, groups[g].first + groups[g].count);
    }
    const bool is_wide = in.dtype() == LLAISYS_DTYPE_F32;
    float *next = scratch.floats(floats + (is_wide ? 0 : end * k));
    float *wide = next + floats; // for x that is not f32
    for (int64_t g = 0; g < n_groups; ++g) {
        inputs[size_t(g)].q = reinterpret_cast<bf16_t *>(next);
        next += floats_of(inputs[size_t(g)], groups[g].count);
    }
    const std::vector<cpu::TileRows> &placed = inputs; // of the calling thread
    const cpu::Kernels &kernels = cpu::kernels();
    const auto place = [&](int64_t g, int64_t i, cpu::Values row) {
        float *buffer = is_wide ? nullptr : wide + (groups[g].first + i) * k;
        tiles->place_row(placed[size_t(g)], i, cpu::read(kernels, row, buffer, k), k);
    };
    for_group_rows(stream, in, rows, groups, n_groups, k, place);
    const int64_t fair =
        fair_pairs(groups, n_groups, first_part, n_parts, device::pool_of(stream).size());
    const auto run = [&](const GroupChunk &chunk) {
        const LinearGroup &group = groups[chunk.group];
        cpu::LinearTask task = group_task(group, chunk, kStrip);
        task.k = padded(k);
        task.w = group.parts[chunk.part].weight->bytes.as<bf16_t>() +
                 chunk.first_panel * kStrip * task.k;
        tiles->linear({placed[size_t(chunk.group)].from(chunk.first_row), task});
    };
    for_group_chunks(
        stream, groups, n_groups, first_part, n_parts, kStrip,
        [=](int64_t m) { return chunk_size(padded(k), m, fair); }, run);
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
