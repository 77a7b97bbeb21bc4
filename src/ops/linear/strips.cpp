#include "ops/linear/cpu.hpp"

#include "ops/cpu/rows.hpp"
#include "ops/cpu/strip_kernels.hpp"
#include "ops/linear/groups.hpp"

#include <atomic>
#include <cstring>

namespace llaisys::ops {

namespace {

using cpu::kPanel;
constexpr DType kBf16 = LLAISYS_DTYPE_BF16;
constexpr DType kChannel = LLAISYS_DTYPE_I8_CHANNEL;

constexpr int64_t kChannelBlock = 32;           // values of a block of i8_channel
constexpr int64_t kChannelBytes = 36;           // of a block: the scale, then the values
constexpr int64_t kMostChannelColumns = 131072; // sums of products of bytes are below 2^31

// Bytes of a value of a weight of this dtype.
constexpr int64_t size_of(DType dtype) { return dtype == kBf16 ? 2 : 1; }

// Outputs, padded.
int64_t outputs_of(int64_t out_features) { return cpu::round_up(out_features, kPanel); }
// Bytes of a row, padded to whole tiles, at least one.
int64_t padded(DType dtype, int64_t k) {
    return std::max(cpu::round_up(k * size_of(dtype), cpu::kTileRowBytes), cpu::kTileRowBytes);
}

// A row of a weight in strips [strips, bytes of a strip]: value k is row[k].
template <typename T> struct StripRow {
    static constexpr int64_t kValues = cpu::kUnitBytes / int64_t(sizeof(T)); // of a unit
    StripRow(const Tensor &bytes, int64_t strip, int64_t row)
        : first_(reinterpret_cast<T *>(bytes.data() + row / strip * bytes.size(1)) +
                 row % strip * kValues),
          step_(strip * kValues) {}
    T &operator[](int64_t k) const { return first_[k / kValues * step_ + k % kValues]; }

private:
    T *first_;
    int64_t step_;
};

const cpu::StripKernels &products(DType dtype) {
    const cpu::StripKernels *kernels = cpu::strip_kernels(dtype);
    ensure(kernels != nullptr, "weights that were laid out for products of ", name_of(dtype),
           ", and no such products");
    return *kernels;
}

// Floats of a group's rows in tile layout, and of their scales.
int64_t tile_floats(const cpu::TileRows &x, int64_t count) {
    return cpu::round_up(x.row_block() * ((count + 15) / 16) / int64_t(sizeof(float)), 16);
}
int64_t scale_floats(DType dtype, int64_t count) {
    constexpr int64_t kFloats = sizeof(cpu::RowScale) / sizeof(float);
    return dtype == kChannel ? cpu::round_up(count * kFloats, 16) : 0;
}

// Largest chunks of many rows.
struct ChunkLimits {
    int64_t rows;
    int64_t panels;

    int64_t row_groups(int64_t m) const { return (m + rows - 1) / rows; }
    // Products per value of x or of a weight that a chunk reads.
    double reuse() const { return double(rows * panels * kPanel) / double(rows + panels * kPanel); }
};

// Enough chunks for all threads, and among those the ones that read least.
ChunkLimits chunk_limits(int64_t most_rows, const LinearGroup *groups, int64_t n_groups,
                         int first_part, int n_parts, int64_t threads) {
    constexpr int64_t kLeastRows = 128;
    constexpr int64_t kChunks = 4; // per thread
    ChunkLimits best{kLeastRows, 1};
    for (ChunkLimits limits{most_rows, 0}; limits.rows >= kLeastRows; limits.rows /= 2) {
        int64_t panels = 0; // of all chunks
        for (int64_t g = 0; g < n_groups; ++g) {
            for (int p = first_part; p < first_part + n_parts; ++p) {
                panels += outputs_of(groups[g].parts[p].weight->out_features) / kPanel *
                          limits.row_groups(groups[g].count);
            }
        }
        limits.panels = std::min(panels / (kChunks * threads), cpu::kTaskPanels);
        if (limits.panels > 0 && limits.reuse() > best.reuse()) {
            best = limits;
        }
    }
    return best;
}

// Strips and rows of a chunk of m rows. `strip`: outputs of a strip.
GroupChunkSize chunk_size(int64_t strip, int64_t bytes, int64_t m, const ChunkLimits &limits) {
    // Minimum products of units in a chunk, so that its overhead is negligible.
    constexpr int64_t kChunkSteps = 8192;
    const int64_t together = kPanel / strip; // strips of a panel, which most chunks keep together
    const int64_t groups = limits.row_groups(m);
    const int64_t rows = cpu::round_up((m + groups - 1) / groups, 32);
    if (m > 32) {
        return {together * limits.panels, rows};
    }
    const int64_t steps = strip * std::max<int64_t>(bytes / cpu::kUnitBytes * m, 1); // of one strip
    const int64_t worthwhile = (kChunkSteps + steps - 1) / steps;
    return {worthwhile == 1 ? 1 : cpu::round_up(worthwhile, together), rows};
}

template <DType dtype>
void run_strips(const device::Stream &stream, const Tensor &in, const int32_t *rows,
                const LinearGroup *groups, int64_t n_groups, int first_part, int n_parts) {
    static thread_local cpu::Scratch scratch;
    static thread_local std::vector<cpu::TileRows> inputs;
    const cpu::StripKernels &kernels = products(dtype);
    const int64_t strip = kernels.strip;
    const int64_t k = in.size(1);
    const int64_t bytes = padded(dtype, k);
    inputs.resize(size_t(n_groups));
    int64_t floats = 0;
    int64_t end = 0; // of the rows
    for (int64_t g = 0; g < n_groups; ++g) {
        inputs[size_t(g)] = {nullptr, std::min<int64_t>(groups[g].count, 16), bytes, nullptr};
        floats += tile_floats(inputs[size_t(g)], groups[g].count);
        floats += scale_floats(dtype, groups[g].count);
        end = std::max(end, groups[g].first + groups[g].count);
    }
    const bool is_wide = in.dtype() == LLAISYS_DTYPE_F32;
    float *next = scratch.floats(floats + (is_wide ? 0 : end * k));
    float *wide = next + floats; // for x that is not f32
    for (int64_t g = 0; g < n_groups; ++g) {
        cpu::TileRows &x = inputs[size_t(g)];
        x.q = reinterpret_cast<char *>(next);
        next += tile_floats(x, groups[g].count);
        x.scales = reinterpret_cast<cpu::RowScale *>(next);
        next += scale_floats(dtype, groups[g].count);
    }
    const std::vector<cpu::TileRows> &placed = inputs; // of the calling thread
    const cpu::Kernels &rows_of = cpu::kernels();
    const auto place = [&](int64_t g, int64_t i, cpu::Values row) {
        float *buffer = is_wide ? nullptr : wide + (groups[g].first + i) * k;
        kernels.place_row(placed[size_t(g)], i, cpu::read(rows_of, row, buffer, k), k);
    };
    for_group_rows(stream, in, rows, groups, n_groups, k, place);
    const ChunkLimits limits = chunk_limits(kernels.task_rows, groups, n_groups, first_part,
                                            n_parts, device::pool_of(stream).size());
    const auto run = [&](const GroupChunk &chunk) {
        const LinearGroup &group = groups[chunk.group];
        const LinearWeight &weight = *group.parts[chunk.part].weight;
        const int64_t first = chunk.first_panel * strip;
        cpu::TileTask task{placed[size_t(chunk.group)].from(chunk.first_row),
                           group_task(group, chunk, strip), nullptr};
        task.out.w = weight.bytes.data() + first * bytes;
        task.scales = dtype == kChannel ? weight.scales.as<float>() + first : nullptr;
        kernels.linear(task);
    };
    for_group_chunks(
        stream, groups, n_groups, first_part, n_parts, strip,
        [=](int64_t m) { return chunk_size(strip, bytes, m, limits); }, run);
}

// Creates the strips of a weight and calls pack(row, to) for every row, on several threads.
template <typename T, typename Pack>
Tensor pack_strips(const device::Stream &stream, const Tensor &weight, const Pack &pack) {
    const int64_t n = weight.size(0);
    const int64_t k = weight.size(1);
    const int64_t strip = products(weight.dtype()).strip;
    const int64_t strips = outputs_of(n) / strip;
    const Tensor bytes =
        Tensor::create({strips, strip * padded(weight.dtype(), k)}, LLAISYS_DTYPE_U8);
    cpu::for_rows(stream, strips, strip * k, [&](int64_t first, int64_t last) {
        for (int64_t row = first * strip; row < std::min(n, last * strip); ++row) {
            pack(row, StripRow<T>(bytes, strip, row));
        }
    });
    return bytes;
}

// out[i] = row index[i] of a weight in strips of T; value(row, q): of element q of the row.
template <typename T, typename Value>
void unpack_rows(const device::Stream &stream, const Tensor &out, const Tensor &index,
                 const LinearWeight &weight, const Value &value) {
    const int64_t k = weight.in_features;
    const int64_t strip = products(weight.format->dtype).strip;
    cpu::for_rows(stream, out.size(0), k, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const int64_t row = index.as<int64_t>()[i];
            const StripRow<T> from(weight.bytes, strip, row);
            visit_real(out.dtype(), [&](auto to) {
                using To = decltype(to);
                To *values = out.as<To>() + i * k;
                for (int64_t j = 0; j < k; ++j) {
                    values[j] = from_f32<To>(value(row, from[j]));
                }
            });
        }
    });
}

void pack_bf16(const device::Stream &stream, const Tensor &weight, LinearWeight *packed) {
    packed->bytes = pack_strips<bf16_t>(stream, weight, [&](int64_t row, StripRow<bf16_t> to) {
        const bf16_t *from = weight.as<bf16_t>() + row * weight.stride(0);
        for (int64_t i = 0; i < weight.size(1); ++i) {
            to[i] = from[i];
        }
    });
}

void rows_of_bf16(const device::Stream &stream, const Tensor &out, const Tensor &index,
                  const LinearWeight &weight) {
    unpack_rows<bf16_t>(stream, out, index, weight,
                        [](int64_t, bf16_t value) { return to_f32(value); });
}

void pack_channel(const device::Stream &stream, const Tensor &weight, LinearWeight *packed) {
    const int64_t k = weight.size(1);
    require(k <= kMostChannelColumns, "a weight in i8_channel can have ", kMostChannelColumns,
            " columns, got ", k);
    check_channel_scales(stream, weight);
    packed->scales = Tensor::create({outputs_of(weight.size(0))}, LLAISYS_DTYPE_F32);
    const int64_t row_bytes = bytes_of(kChannel, k);
    packed->bytes = pack_strips<uint8_t>(stream, weight, [&](int64_t row, StripRow<uint8_t> to) {
        const std::byte *from = weight.data() + row * row_bytes;
        std::memcpy(packed->scales.as<float>() + row, from, row_bytes > 0 ? sizeof(float) : 0);
        for (int64_t i = 0; i < k; ++i) {
            const int64_t at = i / kChannelBlock * kChannelBytes + 4 + i % kChannelBlock;
            to[i] = uint8_t(from[at]) ^ 128;
        }
    });
}

void rows_of_channel(const device::Stream &stream, const Tensor &out, const Tensor &index,
                     const LinearWeight &weight) {
    unpack_rows<uint8_t>(stream, out, index, weight, [&](int64_t row, uint8_t q) {
        return weight.scales.as<float>()[row] * float(int(q) - 128);
    });
}

template <DType dtype> bool has_strips() { return cpu::strip_kernels(dtype) != nullptr; }

} // namespace

const LinearFormat kBf16Strips = {kBf16,   nullptr,           pack_bf16,
                                  nullptr, run_strips<kBf16>, rows_of_bf16,
                                  nullptr, has_strips<kBf16>};
const LinearFormat kChannelStrips = {
    kChannel,        nullptr, pack_channel,        nullptr, run_strips<kChannel>,
    rows_of_channel, nullptr, has_strips<kChannel>};

void check_channel_scales(const device::Stream &stream, const Tensor &weight) {
    const int64_t row_bytes = bytes_of(kChannel, weight.size(1));
    std::atomic<int64_t> wrong{-1}; // a row
    cpu::for_rows(stream, weight.size(0), weight.size(1), [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
            const std::byte *from = weight.data() + row * row_bytes;
            for (int64_t at = 0; at < row_bytes; at += kChannelBytes) {
                if (std::memcmp(from, from + at, sizeof(float)) != 0) {
                    wrong.store(row, std::memory_order_relaxed);
                }
            }
        }
    });
    require(wrong < 0, "i8_channel: the blocks of row ", wrong.load(),
            " have different scales; a row must have one");
}

int64_t strip_bytes(DType dtype, int64_t out_features, int64_t in_features) {
    const int64_t scales = dtype == kChannel ? int64_t(sizeof(float)) : 0;
    return outputs_of(out_features) * (padded(dtype, in_features) + scales);
}

} // namespace llaisys::ops
