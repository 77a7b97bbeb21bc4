#include "ops/lora/op.hpp"

#include "ops/checks.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

namespace llaisys::ops {

namespace {

// Few rows per tile divide the work of a decode step; many read an adapter less often.
constexpr int64_t kFewRows = 512;
constexpr int64_t kSmallTile = 16;
constexpr int64_t kLargeTile = 64;

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

bool is_cpu(const device::Stream &stream) { return stream.type() == LLAISYS_DEVICE_CPU; }

// in [rows, columns] as `dtype` in rows of `width` values of out, or transposed.
void convert(DType dtype, std::byte *out, int64_t width, const Tensor &in, bool is_transposed) {
    if (dtype == in.dtype() && !is_transposed) {
        const auto bytes = size_t(bytes_of(dtype, in.size(1)));
        for (int64_t i = 0; i < in.size(0); ++i) {
            std::memcpy(out + bytes_of(dtype, i * width),
                        in.data() + bytes_of(dtype, i * in.stride(0)), bytes);
        }
        return;
    }
    visit_real(dtype, [&](auto to) {
        visit_real(in.dtype(), [&](auto from) {
            using To = decltype(to);
            using From = decltype(from);
            To *values = reinterpret_cast<To *>(out);
            for (int64_t i = 0; i < in.size(0); ++i) {
                const From *row = in.as<From>() + i * in.stride(0);
                for (int64_t j = 0; j < in.size(1); ++j) {
                    values[is_transposed ? j * width + i : i * width + j] =
                        from_f32<To>(to_f32(row[j]));
                }
            }
        });
    });
}

void check_matrix(const char *name, const Tensor &tensor, const Shape &expected) {
    require(tensor.defined() && tensor.device() == LLAISYS_DEVICE_CPU, "lora: ", name,
            ": expected a host tensor");
    require(is_activation(tensor.dtype()), "lora: ", name, ": got dtype ", name_of(tensor.dtype()),
            ", expected f32, f16 or bf16");
    require(tensor.shape() == expected && tensor.has_dense_rows(), "lora: ", name, ": got ",
            tensor.shape(), ", expected ", expected);
}

void check_lora(const Checks &check, const Tensor &in, const LoraPart *parts, int n_parts,
                const LoraRows &rows, const Tensor &scratch) {
    check.real_rows("in", in, 2);
    require(n_parts >= 1 && n_parts <= kMaxLoraParts, "lora: parts must be 1 to ", kMaxLoraParts,
            ", got ", n_parts);
    const int64_t m = in.size(0);
    const LoraWeight &first = *parts[0].weight;
    for (int p = 0; p < n_parts; ++p) {
        const LoraWeight &weight = *parts[p].weight;
        check.device("a", weight.a);
        check.dtype("a", weight.a, first.a.dtype());
        check.shape("a", weight.a, {first.n_slots(), first.max_rank(), in.size(1)});
        check.real_output("out", *parts[p].out, {m, weight.out_features()});
    }
    check.vector("rows", rows.rows, LLAISYS_DTYPE_I32, m);
    check.device("tiles", rows.tiles);
    check.dtype("tiles", rows.tiles, LLAISYS_DTYPE_I32);
    check.shape("tiles", rows.tiles, {lora_tiles(m, first.n_slots()), 4});
    check.device("scratch", scratch);
    check.dtype("scratch", scratch, LLAISYS_DTYPE_F32);
    const int64_t needed = lora_scratch(m, n_parts, in.size(1), first.max_rank());
    require(scratch.elements() >= needed, "lora: scratch: got ", scratch.elements(),
            " values, expected ", needed);
}

} // namespace

int64_t LoraWeight::bytes_of(DType dtype, int64_t n_slots, int64_t max_rank, int64_t out_features,
                             int64_t in_features) {
    return llaisys::bytes_of(dtype, n_slots * round_up(max_rank, kLoraRankUnit) *
                                        (out_features + in_features)) +
           n_slots * 2 * int64_t(sizeof(int32_t));
}

LoraWeight LoraWeight::create(const device::Stream &stream, DType dtype, int64_t n_slots,
                              int64_t max_rank, int64_t out_features, int64_t in_features) {
    require(n_slots >= 1 && max_rank >= 1 && max_rank <= kMaxLoraRank,
            "lora: max_rank must be in [1, ", kMaxLoraRank, "] and slots at least 1, got ",
            max_rank, " and ", n_slots);
    const int64_t rank = round_up(max_rank, kLoraRankUnit);
    const auto create = [&](const Shape &shape, DType of) {
        return Tensor::create(shape, of, stream.type(), stream.device_id());
    };
    LoraWeight weight;
    weight.a = create({n_slots, rank, in_features}, dtype);
    weight.b = is_cpu(stream) ? create({n_slots, rank, out_features}, dtype)
                              : create({n_slots, out_features, rank}, dtype);
    weight.slots = create({n_slots, 2}, LLAISYS_DTYPE_I32);
    return weight;
}

void LoraWeight::set(const device::Stream &stream, int64_t slot, const Tensor &slot_a,
                     const Tensor &slot_b, float scale) const {
    require(slot >= 0 && slot < n_slots(), "lora: slot must be in [0, ", n_slots(), "), got ",
            slot);
    const int64_t rank = slot_a.ndim() == 2 ? slot_a.size(0) : 0;
    require(rank >= 1 && rank <= max_rank(), "lora: a: got ", slot_a.shape(),
            ", expected a rank in [1, ", max_rank(), "]");
    check_matrix("a", slot_a, {rank, in_features()});
    check_matrix("b", slot_b, {out_features(), rank});
    const DType dtype = a.dtype();
    std::vector<std::byte> values;
    const auto load = [&](const Tensor &to, const Tensor &from, bool is_transposed) {
        Tensor part = to.slice(0, slot, slot + 1);
        values.assign(size_t(part.bytes()), std::byte(0));
        convert(dtype, values.data(), to.size(2), from, is_transposed);
        part.load(stream, values.data(), values.size());
    };
    clear(stream, slot); // while a and b do not belong together
    load(a, slot_a, false);
    load(b, slot_b, is_cpu(stream));
    int32_t entry[2] = {int32_t(rank), 0};
    std::memcpy(&entry[1], &scale, sizeof scale);
    slots.slice(0, slot, slot + 1).load(stream, entry, sizeof entry);
}

void LoraWeight::clear(const device::Stream &stream, int64_t slot) const {
    require(slot >= 0 && slot < n_slots(), "lora: slot must be in [0, ", n_slots(), "), got ",
            slot);
    const int32_t entry[2] = {0, 0};
    slots.slice(0, slot, slot + 1).load(stream, entry, sizeof entry);
}

int64_t lora_tile_rows(int64_t m) { return m <= kFewRows ? kSmallTile : kLargeTile; }

int64_t lora_tiles(int64_t m, int64_t n_slots) {
    return 1 + std::min(m, (m + lora_tile_rows(m) - 1) / lora_tile_rows(m) + n_slots + 1);
}

void group_lora_rows(const int32_t *slots, int64_t m, const int32_t *ranks, int64_t n_slots,
                     int32_t *rows, int32_t *tiles) {
    // Counts, then the next index of each slot; rows without an adapter are last.
    static thread_local std::vector<int32_t> next;
    next.assign(size_t(n_slots) + 2, 0);
    const auto group_of = [&](int32_t slot) {
        return size_t(slot < 0 || ranks[slot] == 0 ? n_slots : slot);
    };
    for (int64_t i = 0; i < m; ++i) {
        require(slots[i] >= -1 && slots[i] < n_slots, "lora: slots[", i, "] must be in [-1, ",
                n_slots, "), got ", slots[i]);
        ++next[group_of(slots[i]) + 1];
    }
    auto *tile = reinterpret_cast<LoraTile *>(tiles) + 1;
    const auto most = int32_t(lora_tile_rows(m));
    for (int64_t g = 0; g <= n_slots; ++g) {
        int32_t first = next[size_t(g)];
        const int32_t end = next[size_t(g) + 1] += first;
        if (g == n_slots) {
            tiles[0] = int32_t(tile - reinterpret_cast<LoraTile *>(tiles) - 1);
        }
        for (; first < end; first += most) {
            const int32_t count = std::min(most, end - first);
            *tile++ = g < n_slots ? LoraTile{int32_t(g), first, count,
                                             int32_t(round_up(ranks[g], kLoraRankUnit))}
                                  : LoraTile{-1, first, count, 0};
        }
    }
    tiles[1] = int32_t(tile - reinterpret_cast<LoraTile *>(tiles) - 1);
    auto *end = reinterpret_cast<LoraTile *>(tiles) + lora_tiles(m, n_slots);
    std::fill(tile, end, LoraTile{-1, 0, 0, 0});
    tiles[2] = tiles[3] = 0;
    for (int64_t i = 0; i < m; ++i) {
        rows[next[group_of(slots[i])]++] = int32_t(i);
    }
}

int64_t lora_scratch(int64_t m, int64_t n_parts, int64_t in_features, int64_t max_rank) {
    return lora_splits(in_features, max_rank) * m * n_parts * round_up(max_rank, kLoraRankUnit);
}

void lora(const device::Stream &stream, const Tensor &in, const LoraPart *parts, int n_parts,
          const LoraRows &rows, const Tensor &scratch) {
    const Checks check{"lora", stream};
    check_lora(check, in, parts, n_parts, rows, scratch);
    if (in.size(0) == 0) {
        return;
    }
    check.dispatch(LLAISYS_KERNELS(lora), in, parts, n_parts, rows, scratch);
}

void add_pending_lora(const device::Stream &stream, const Tensor &out, const PendingLora &pending) {
    if (pending.weight == nullptr || out.size(0) == 0) {
        return;
    }
#if defined(LLAISYS_HAVE_CUDA)
    if (stream.type() == LLAISYS_DEVICE_NVIDIA) {
        const LoraPart part{pending.weight, &out};
        if (pending.in.defined()) {
            return lora(stream, pending.in, &part, 1, *pending.rows, pending.terms);
        }
        return lora_expand_cuda(stream, &part, 1, *pending.rows, pending.terms, pending.splits);
    }
#endif
    Checks{"add_pending_lora", stream}.no_kernel();
}

} // namespace llaisys::ops
