#include "ops/linear/cpu.hpp"

#include "ops/cpu/quant_panels.hpp"
#include "ops/cpu/rows.hpp"
#include "ops/cpu/strip_kernels.hpp"
#include "ops/linear/groups.hpp"

#include <iterator>

namespace llaisys::ops {

namespace {

using cpu::kPanel;

// Pack the 32 rows of w from `first` on, k values each, as one panel. Rows past n_rows are
// unchanged.
template <typename T>
void pack_panel(T *panel, const T *w, int64_t ldw, int64_t n_rows, int64_t k) {
    constexpr int64_t kBlock = 64; // K block with good locality of reads and writes
    constexpr DType dtype = dtype_of<T>::value;
    for (int64_t begin = 0; begin < k; begin += kBlock) {
        const int64_t end = std::min(k, begin + kBlock);
        for (int64_t j = 0; j < n_rows; ++j) {
            const T *from = w + j * ldw;
            T *to = panel + cpu::panel_index(dtype, j);
            for (int64_t i = begin; i < end; ++i) {
                to[i * kPanel] = from[i];
            }
        }
    }
}

// Rows at a stride of a multiple of 4 KiB map to the same L1 sets.
bool collides(int64_t stride, int64_t m) { return m >= 8 && stride % 1024 == 0; }

// Panels and rows of a chunk of m rows.
GroupChunkSize chunk_size(int64_t k, int64_t m) {
    // Multiply-adds of a chunk, one or two microseconds: overhead is negligible and load is
    // balanced.
    constexpr int64_t kChunkSteps = 16384;
    constexpr int64_t kWholeTiles = 24; // tiles are 4, 6, 8 or 12 rows high
    static_assert(cpu::kLinearRows % kWholeTiles == 0);
    const int64_t steps = kPanel * std::max<int64_t>(k * m, 1); // of one panel
    const int64_t row_groups = (m + cpu::kLinearRows - 1) / cpu::kLinearRows;
    // Even groups of whole register tiles, for any tile height.
    const int64_t even = cpu::round_up((m + row_groups - 1) / row_groups, kWholeTiles);
    return {(kChunkSteps + steps - 1) / steps, row_groups < 2 ? m : even};
}

void pack_panels(const device::Stream &stream, const Tensor &weight, LinearWeight *result) {
    const int64_t n = weight.size(0);
    const int64_t k = weight.size(1);
    const int64_t panels = (n + kPanel - 1) / kPanel;
    const Tensor packed = Tensor::create({panels, k, kPanel}, weight.dtype());
    visit_real(weight.dtype(), [&](auto type) {
        using T = decltype(type);
        cpu::for_rows(stream, panels, kPanel * k, [&](int64_t first, int64_t last) {
            for (int64_t p = first; p < last; ++p) {
                pack_panel(packed.as<T>() + p * k * kPanel,
                           weight.as<T>() + p * kPanel * weight.stride(0), weight.stride(0),
                           std::min(kPanel, n - p * kPanel), k);
            }
        });
    });
    result->bytes = packed;
}

void run_panels(const device::Stream &stream, const Tensor &in, const int32_t *rows,
                const LinearGroup *groups, int64_t n_groups, int first_part, int n_parts) {
    static thread_local cpu::Scratch scratch;
    const int64_t k = in.size(1);
    const int64_t ldx = cpu::round_up(k, 16) + 16;
    // f32 rows at one stride are read in place; all others are copied, row r to x + r * ldx.
    const auto is_in_place = [&](const LinearGroup &group) {
        return in.dtype() == LLAISYS_DTYPE_F32 &&
               (group.count == 1 || (rows == nullptr && !collides(in.stride(0), group.count)));
    };
    int64_t end = 0; // of the copied rows
    for (int64_t g = 0; g < n_groups; ++g) {
        end = is_in_place(groups[g]) ? end : std::max(end, groups[g].first + groups[g].count);
    }
    float *x = scratch.floats(end * ldx);
    const cpu::Kernels &kernels = cpu::kernels();
    const auto copy = [&](int64_t g, int64_t i, cpu::Values row) {
        if (!is_in_place(groups[g])) {
            cpu::convert(kernels, cpu::values_of(x + (groups[g].first + i) * ldx), row, k);
        }
    };
    if (end > 0) {
        for_group_rows(stream, in, rows, groups, n_groups, k, copy);
    }
    const auto run = [&](const GroupChunk &chunk) {
        const LinearGroup &group = groups[chunk.group];
        const LinearWeight &weight = *group.parts[chunk.part].weight;
        const int64_t row = group.first + chunk.first_row;
        cpu::LinearTask task = group_task(group, chunk, kPanel);
        if (is_in_place(group)) {
            task.x = in.as<float>() + (rows != nullptr ? rows[row] : row) * in.stride(0);
            task.ldx = in.stride(0);
        } else {
            task.x = x + row * ldx;
            task.ldx = ldx;
        }
        task.k = k;
        task.w = cpu::values_of(weight.bytes, chunk.first_panel * kPanel * k).data;
        kernels.linear.run(weight.bytes.dtype(), task);
    };
    for_group_chunks(
        stream, groups, n_groups, first_part, n_parts, kPanel,
        [=](int64_t m) { return chunk_size(k, m); }, run);
}

void rows_of_panels(const device::Stream &stream, const Tensor &out, const Tensor &index,
                    const LinearWeight &weight) {
    const int64_t k = weight.in_features;
    const DType dtype = weight.bytes.dtype();
    cpu::for_rows(stream, out.size(0), k, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const int64_t row = index.as<int64_t>()[i];
            const int64_t start =
                row / cpu::kPanel * k * cpu::kPanel + cpu::panel_index(dtype, row % cpu::kPanel);
            visit_real(dtype, [&](auto from) {
                visit_real(out.dtype(), [&](auto to) {
                    using From = decltype(from);
                    using To = decltype(to);
                    const From *in = weight.bytes.as<From>() + start;
                    To *values = out.as<To>() + i * k;
                    for (int64_t j = 0; j < k; ++j) {
                        values[j] = from_f32<To>(to_f32(in[j * cpu::kPanel]));
                    }
                });
            });
        }
    });
}

constexpr LinearFormat plain(DType dtype) {
    return {dtype, nullptr, pack_panels, nullptr, run_panels, rows_of_panels};
}

constexpr LinearFormat quantised(DType dtype) {
    return {dtype, nullptr, pack_quantised, nullptr, run_quantised, rows_of_quantised};
}

} // namespace

int64_t linear_bytes_cpu(DType dtype, int64_t out_features, int64_t in_features) {
    const bool has_strips = dtype == LLAISYS_DTYPE_BF16 || dtype == LLAISYS_DTYPE_I8_CHANNEL;
    if (has_strips && cpu::strip_kernels(dtype) != nullptr) {
        return strip_bytes(dtype, out_features, in_features);
    }
    const int64_t panels = (out_features + kPanel - 1) / kPanel;
    return panels * (is_quantised(dtype) ? cpu::quant_layout_of(dtype).panel_bytes(in_features)
                                         : bytes_of(dtype, kPanel * in_features));
}

LinearFormats linear_formats_cpu() {
    static const LinearFormat kFormats[] = {
        kBf16Strips,
        kChannelStrips,
        plain(LLAISYS_DTYPE_F32),
        plain(LLAISYS_DTYPE_F16),
        plain(LLAISYS_DTYPE_BF16),
        quantised(LLAISYS_DTYPE_Q8_0),
        quantised(LLAISYS_DTYPE_Q4_0),
        quantised(LLAISYS_DTYPE_Q4_1),
        quantised(LLAISYS_DTYPE_Q5_0),
        quantised(LLAISYS_DTYPE_Q5_1),
        quantised(LLAISYS_DTYPE_Q4_K),
        quantised(LLAISYS_DTYPE_Q5_K),
        quantised(LLAISYS_DTYPE_Q6_K),
        quantised(LLAISYS_DTYPE_Q2_K),
        quantised(LLAISYS_DTYPE_Q3_K),
        quantised(LLAISYS_DTYPE_IQ4_NL),
        quantised(LLAISYS_DTYPE_I4_G32),
        quantised(LLAISYS_DTYPE_I4_G128),
        quantised(LLAISYS_DTYPE_I8_G32),
        quantised(LLAISYS_DTYPE_I8_G128),
        quantised(LLAISYS_DTYPE_I8_CHANNEL),
    };
    return {kFormats, int(std::size(kFormats))};
}

} // namespace llaisys::ops
