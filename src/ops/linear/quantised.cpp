#include "ops/linear/cpu.hpp"

#include "ops/cpu/quant_kernels.hpp"
#include "ops/cpu/rows.hpp"
#include "ops/linear/groups.hpp"

namespace llaisys::ops {

namespace {

using cpu::kQuantGroup;
using cpu::kQuantPanel;

// Rows processed at a time: as many as stay in L2 while the weight panels stream.
int64_t rows_together(int64_t k) {
    constexpr int64_t kCacheBytes = 512 << 10;
    constexpr int64_t kStep = 3 * cpu::kRowBlock;
    const int64_t row_bytes = k + k / kQuantGroup * int64_t(sizeof(cpu::QuantGroup));
    const int64_t rows = kCacheBytes / std::max<int64_t>(row_bytes, 1) / kStep * kStep;
    return std::clamp(rows, kStep, cpu::kLinearRows);
}

} // namespace

void run_quantised(const device::Stream &stream, const Tensor &in, const int32_t *rows,
                   const LinearGroup *groups, int64_t n_groups, int first_part, int n_parts) {
    static thread_local cpu::Scratch scratch;
    static thread_local std::vector<cpu::QuantRows> inputs;
    const int64_t k = in.size(1);
    constexpr int64_t kFloats = sizeof(cpu::QuantGroup) / sizeof(float);
    constexpr int64_t kByteFloats = kQuantGroup / int64_t(sizeof(float)); // of a group of values
    const auto groups_of = [&](int64_t count) {                           // of quantised values
        return (count + cpu::kRowBlock - 1) / cpu::kRowBlock * std::min(count, cpu::kRowBlock) *
               (k / kQuantGroup);
    };
    inputs.resize(size_t(n_groups));
    int64_t all = 0;
    int64_t end = 0; // of the rows
    for (int64_t g = 0; g < n_groups; ++g) {
        all += groups_of(groups[g].count);
        end = std::max(end, groups[g].first + groups[g].count);
    }
    const bool is_wide = in.dtype() == LLAISYS_DTYPE_F32;
    float *memory = scratch.floats(all * (kByteFloats + kFloats) + (is_wide ? 0 : end * k));
    int64_t at = 0;
    for (int64_t g = 0; g < n_groups; ++g) {
        cpu::QuantRows &x = inputs[size_t(g)];
        x.height = std::min(groups[g].count, cpu::kRowBlock);
        x.k = k;
        x.q = reinterpret_cast<int8_t *>(memory + at * kByteFloats);
        x.groups = reinterpret_cast<cpu::QuantGroup *>(memory + all * kByteFloats + at * kFloats);
        at += groups_of(groups[g].count);
    }
    float *wide = memory + all * (kByteFloats + kFloats);       // for x that is not f32
    const std::vector<cpu::QuantRows> &quantised_rows = inputs; // of the calling thread
    const cpu::Kernels &kernels = cpu::kernels();
    const cpu::QuantKernels &bytes = cpu::quant_kernels();
    const auto quantise = [&](int64_t g, int64_t i, cpu::Values row) {
        float *buffer = is_wide ? nullptr : wide + (groups[g].first + i) * k;
        bytes.quantise(quantised_rows[size_t(g)], i, cpu::read(kernels, row, buffer, k));
    };
    for_group_rows(stream, in, rows, groups, n_groups, 2 * k, quantise);
    const int64_t together = rows_together(k);
    const auto size_of = [=](int64_t count) {
        constexpr int64_t kChunkSteps = 32768; // larger than for f32: byte products are faster
        const int64_t steps = kQuantPanel * std::max<int64_t>(k * count, 1);
        return GroupChunkSize{(kChunkSteps + steps - 1) / steps, together};
    };
    const auto run = [&](const GroupChunk &chunk) {
        const LinearGroup &group = groups[chunk.group];
        const LinearWeight &weight = *group.parts[chunk.part].weight;
        cpu::QuantTask task;
        task.x = quantised_rows[size_t(chunk.group)].from(chunk.first_row);
        task.w = weight.bytes.data() + chunk.first_panel * weight.bytes.size(1);
        task.out = group_task(group, chunk, kQuantPanel);
        bytes.products[cpu::quant_format_of(weight.format->dtype)](task);
    };
    for_group_chunks(stream, groups, n_groups, first_part, n_parts, kQuantPanel, size_of, run);
}

} // namespace llaisys::ops
