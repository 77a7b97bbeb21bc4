#include "ops/linear/quantised.hpp"

#include "ops/cpu/quant_kernels.hpp"
#include "ops/cpu/rows.hpp"
#include "ops/linear/groups.hpp"

namespace llaisys::ops {

namespace {

using cpu::kQuantGroup;
using cpu::kQuantPanel;

int64_t panels_of(const LinearPart &part) {
    return (part.weight->out_features + kQuantPanel - 1) / kQuantPanel;
}

// Rows processed at a time: as many as stay in L2 while the weight panels stream.
int64_t rows_together(int64_t k) {
    constexpr int64_t kCacheBytes = 512 << 10;
    constexpr int64_t kStep = 3 * cpu::kRowBlock;
    const int64_t row_bytes = k + k / kQuantGroup * int64_t(sizeof(cpu::QuantGroup));
    const int64_t rows = kCacheBytes / std::max<int64_t>(row_bytes, 1) / kStep * kStep;
    return std::clamp(rows, kStep, cpu::kLinearRows);
}

// The m rows of `in`, quantised, in scratch memory.
cpu::QuantRows quantised(const device::Stream &stream, const Tensor &in, const Tensor *rows,
                         int64_t m, cpu::Scratch *scratch) {
    const int32_t *index = rows != nullptr ? rows->as<int32_t>() : nullptr;
    const int64_t k = in.size(1);
    constexpr int64_t kFloats = sizeof(cpu::QuantGroup) / sizeof(float);
    cpu::QuantRows x;
    x.height = std::min(m, cpu::kRowBlock);
    x.k = k;
    const int64_t n_groups =
        (m + cpu::kRowBlock - 1) / cpu::kRowBlock * x.height * (k / kQuantGroup);
    const int64_t bytes_end = n_groups * kQuantGroup / int64_t(sizeof(float));
    const int64_t groups_end = bytes_end + kFloats * n_groups;
    float *memory = scratch->floats(groups_end + m * k);
    x.q = reinterpret_cast<int8_t *>(memory);
    x.groups = reinterpret_cast<cpu::QuantGroup *>(memory + bytes_end);
    float *wide = memory + groups_end; // for x that is not f32
    const cpu::Kernels &kernels = cpu::kernels();
    const cpu::QuantKernels &bytes = cpu::quant_kernels();
    cpu::for_rows(stream, m, 2 * k, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const std::byte *row = cpu::row_of(in, index != nullptr ? index[i] : i);
            bytes.quantise(x, i, cpu::read(kernels, row, in.dtype(), wide + i * k, k));
        }
    });
    return x;
}

} // namespace

void run_quantised(const device::Stream &stream, const Tensor &in, const LinearPart *parts,
                   int n_parts, const Tensor *rows) {
    static thread_local cpu::Scratch scratch;
    const int64_t m = rows != nullptr ? rows->size(0) : in.size(0);
    const cpu::QuantRows x = quantised(stream, in, rows, m, &scratch);
    const cpu::QuantKernels &bytes = cpu::quant_kernels();
    constexpr int64_t kChunkSteps = 32768; // larger than for f32: byte products are faster
    const int64_t panel_steps = kQuantPanel * std::max<int64_t>(x.k * m, 1);
    const int64_t group = (kChunkSteps + panel_steps - 1) / panel_steps; // panels of a chunk
    int64_t groups = 0;
    for (int p = 0; p < n_parts; ++p) {
        groups += (panels_of(parts[p]) + group - 1) / group;
    }
    const int64_t together = rows_together(x.k);
    const int64_t row_groups = (m + together - 1) / together;
    device::pool_of(stream).run(groups * row_groups, [&](int64_t chunk, int) {
        const int64_t first_row = chunk / groups * together;
        int64_t number = chunk % groups;
        int p = 0;
        for (; number >= (panels_of(parts[p]) + group - 1) / group; ++p) {
            number -= (panels_of(parts[p]) + group - 1) / group;
        }
        const LinearPart &part = parts[p];
        const int64_t first = number * group * kQuantPanel;
        cpu::QuantTask task;
        task.x = x.from(first_row);
        task.w = part.weight->bytes.data() + number * group * part.weight->bytes.size(1);
        task.out = cpu::LinearTask{};
        task.out.m = std::min(together, m - first_row);
        task.out.n = std::min(group * kQuantPanel, part.weight->out_features - first);
        task.out.bias =
            part.bias != nullptr ? cpu::at(part.bias->data(), part.bias->dtype(), first) : nullptr;
        task.out.bias_dtype = part.bias != nullptr ? part.bias->dtype() : LLAISYS_DTYPE_F32;
        task.out.out = cpu::at(cpu::row_of(*part.out, first_row), part.out->dtype(), first);
        task.out.out_dtype = part.out->dtype();
        task.out.ldo = part.out->stride(0);
        bytes.of(part.weight->format->dtype)(task);
    });
}

void run_quantised_groups(const device::Stream &stream, const Tensor &in, const int32_t *rows,
                          const LinearGroup *groups, int64_t n_groups, int first_part,
                          int n_parts) {
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
    for (int64_t g = 0; g < n_groups; ++g) {
        all += groups_of(groups[g].count);
    }
    const int64_t lanes = std::min<int64_t>(n_groups, int64_t(device::pool_of(stream).size()) * 4);
    float *memory = scratch.floats(all * (kByteFloats + kFloats) + lanes * k);
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
    device::pool_of(stream).run(lanes, [&](int64_t lane, int) {
        for (int64_t g = n_groups * lane / lanes; g < n_groups * (lane + 1) / lanes; ++g) {
            for (int64_t i = 0; i < groups[g].count; ++i) {
                const int64_t from = groups[g].first + i;
                const std::byte *row = cpu::row_of(in, rows != nullptr ? rows[from] : from);
                bytes.quantise(quantised_rows[size_t(g)], i,
                               cpu::read(kernels, row, in.dtype(), wide + lane * k, k));
            }
        }
    });
    const int64_t together = rows_together(k);
    const auto size_of = [&](int64_t count) {
        constexpr int64_t kChunkSteps = 32768; // as in run_quantised
        const int64_t steps = kQuantPanel * std::max<int64_t>(k * count, 1);
        return GroupChunkSize{(kChunkSteps + steps - 1) / steps, together};
    };
    for_group_chunks(stream, groups, n_groups, first_part, n_parts, kQuantPanel, size_of,
                     [&](const GroupChunk &chunk) {
                         const LinearGroup &group = groups[chunk.group];
                         const LinearWeight &weight = *group.parts[chunk.part].weight;
                         cpu::QuantTask task;
                         task.x = quantised_rows[size_t(chunk.group)].from(chunk.first_row);
                         task.w = weight.bytes.data() + chunk.first_panel * weight.bytes.size(1);
                         task.out = group_task(group, chunk, kQuantPanel);
                         bytes.of(weight.format->dtype)(task);
                     });
}

} // namespace llaisys::ops
