#include "ops/linear/cpu.hpp"

#include "ops/cpu/bf16_kernels.hpp"
#include "ops/cpu/rows.hpp"
#include "ops/linear/groups.hpp"

namespace llaisys::ops {

namespace {

using cpu::kPanel;
using cpu::kTileK;

// Outputs, padded.
int64_t outputs_of(int64_t out_features) { return cpu::round_up(out_features, kPanel); }
// k padded to whole tiles, at least one.
int64_t padded(int64_t k) { return std::max(cpu::round_up(k, kTileK), kTileK); }

// Index of value k of output j within its strip of this many outputs.
constexpr int64_t place_of(int64_t strip, int64_t j, int64_t k) {
    return k / 2 * 2 * strip + 2 * j + k % 2;
}

const cpu::Bf16Kernels &products() {
    const cpu::Bf16Kernels *kernels = cpu::bf16_kernels();
    ensure(kernels != nullptr,
           "weights that were laid out for bf16 products, and no such products");
    return *kernels;
}

// Floats of a group's rows in tile layout: two bf16 each.
int64_t floats_of(const cpu::TileRows &x, int64_t count) {
    return cpu::round_up(x.row_block() * ((count + 15) / 16) / 2, 16);
}

int64_t row_groups_of(int64_t m) { return (m + cpu::kTileTaskRows - 1) / cpu::kTileTaskRows; }

// Strips and rows of a chunk of m rows. `strip`: outputs of a strip; `fair`: panels of a chunk for
// load balance.
GroupChunkSize chunk_size(int64_t strip, int64_t k, int64_t m, int64_t fair) {
    // Minimum work of a chunk, so that its overhead is negligible.
    constexpr int64_t kChunkSteps = 16384;
    const int64_t together = kPanel / strip; // strips of a panel, which most chunks keep together
    const int64_t rows = cpu::round_up((m + row_groups_of(m) - 1) / row_groups_of(m), 32);
    if (m > 32) {
        return {together * std::clamp<int64_t>(fair, 1, cpu::kTaskPanels), rows};
    }
    const int64_t steps = strip * std::max<int64_t>(k * m, 1); // of one strip
    const int64_t worthwhile = (kChunkSteps + steps - 1) / steps;
    return {worthwhile == 1 ? 1 : cpu::round_up(worthwhile, together), rows};
}

// Panels of a chunk that divide the work of all groups evenly.
int64_t fair_panels(const LinearGroup *groups, int64_t n_groups, int first_part, int n_parts,
                    int64_t threads) {
    constexpr int64_t kChunks = 4; // per thread
    int64_t panels = 0;
    for (int64_t g = 0; g < n_groups; ++g) {
        for (int p = first_part; p < first_part + n_parts; ++p) {
            panels += outputs_of(groups[g].parts[p].weight->out_features) / kPanel *
                      row_groups_of(groups[g].count);
        }
    }
    return panels / (kChunks * threads);
}

} // namespace

int64_t bf16_strip_bytes(int64_t out_features, int64_t in_features) {
    return outputs_of(out_features) * padded(in_features) * int64_t(sizeof(bf16_t));
}

void pack_bf16_strips(const device::Stream &stream, const Tensor &weight, LinearWeight *packed) {
    const int64_t n = weight.size(0);
    const int64_t k = weight.size(1);
    const int64_t strip = products().strip;
    const int64_t strips = outputs_of(n) / strip;
    packed->bytes = Tensor::create({strips, padded(k) / 2, strip, 2}, LLAISYS_DTYPE_BF16);
    bf16_t *bytes = packed->bytes.as<bf16_t>();
    cpu::for_rows(stream, strips, strip * k, [&](int64_t first, int64_t last) {
        for (int64_t row = first * strip; row < std::min(n, last * strip); ++row) {
            const bf16_t *from = weight.as<bf16_t>() + row * weight.stride(0);
            bf16_t *to = bytes + row / strip * strip * padded(k);
            for (int64_t i = 0; i < k; ++i) {
                to[place_of(strip, row % strip, i)] = from[i];
            }
        }
    });
}

void run_bf16_strips(const device::Stream &stream, const Tensor &in, const int32_t *rows,
                     const LinearGroup *groups, int64_t n_groups, int first_part, int n_parts) {
    static thread_local cpu::Scratch scratch;
    static thread_local std::vector<cpu::TileRows> inputs;
    const cpu::Bf16Kernels &kernels = products();
    const int64_t strip = kernels.strip;
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
    const cpu::Kernels &rows_of = cpu::kernels();
    const auto place = [&](int64_t g, int64_t i, cpu::Values row) {
        float *buffer = is_wide ? nullptr : wide + (groups[g].first + i) * k;
        kernels.place_row(placed[size_t(g)], i, cpu::read(rows_of, row, buffer, k), k);
    };
    for_group_rows(stream, in, rows, groups, n_groups, k, place);
    const int64_t fair =
        fair_panels(groups, n_groups, first_part, n_parts, device::pool_of(stream).size());
    const auto run = [&](const GroupChunk &chunk) {
        const LinearGroup &group = groups[chunk.group];
        cpu::LinearTask task = group_task(group, chunk, strip);
        task.k = padded(k);
        task.w =
            group.parts[chunk.part].weight->bytes.as<bf16_t>() + chunk.first_panel * strip * task.k;
        kernels.linear({placed[size_t(chunk.group)].from(chunk.first_row), task});
    };
    for_group_chunks(
        stream, groups, n_groups, first_part, n_parts, strip,
        [=](int64_t m) { return chunk_size(strip, padded(k), m, fair); }, run);
}

void rows_of_bf16_strips(const device::Stream &stream, const Tensor &out, const Tensor &index,
                         const LinearWeight &weight) {
    const int64_t k = weight.in_features;
    const bf16_t *bytes = weight.bytes.as<bf16_t>();
    const int64_t strip = products().strip;
    cpu::for_rows(stream, out.size(0), k, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const int64_t row = index.as<int64_t>()[i];
            const bf16_t *from = bytes + row / strip * strip * padded(k);
            visit_real(out.dtype(), [&](auto to) {
                using To = decltype(to);
                To *values = out.as<To>() + i * k;
                for (int64_t j = 0; j < k; ++j) {
                    values[j] = from_f32<To>(to_f32(from[place_of(strip, row % strip, j)]));
                }
            });
        }
    });
}

} // namespace llaisys::ops
