#include "ops/linear/op.hpp"

#include "ops/checks.hpp"
#include "ops/linear/cpu.hpp"
#include "ops/linear/cuda.hpp"
#include "ops/quant_rows.hpp"

#include <string>

namespace llaisys::ops {

namespace {

// The row of the device's format table for weights of this dtype.
const LinearFormat &format_of(const Checks &check, DType dtype) {
    LinearFormats formats{};
    switch (check.stream.type()) {
    case LLAISYS_DEVICE_CPU:
        formats = linear_formats_cpu();
        break;
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        formats = linear_formats_cuda();
        break;
#endif
    default:
        check.no_kernel();
    }
    std::string names;
    for (int i = 0; i < formats.count; ++i) {
        const LinearFormat &format = formats.rows[i];
        if (format.dtype == dtype && (format.is_available == nullptr || format.is_available())) {
            return format;
        }
        if (format.is_available == nullptr) {
            names += (names.empty() ? "" : ", ") + std::string(name_of(format.dtype));
        }
    }
    fail(LLAISYS_ERROR_INVALID, check.op, ": weight: got dtype ", name_of(dtype),
         ", expected one of ", names);
}

void check_part(const Checks &check, const LinearPart &part, int64_t rows, int64_t in_features) {
    require(part.weight != nullptr && part.weight->defined(), check.op,
            ": weight: got none, expected a packed weight");
    check.device("weight", part.weight->bytes);
    require(part.weight->in_features == in_features, check.op, ": in: got ", in_features,
            " columns, expected the in_features of the weight, ", part.weight->in_features);
    const int64_t n = part.weight->out_features;
    if (part.bias != nullptr) {
        check.real_rows("bias", *part.bias, {n});
    }
    require(part.out != nullptr, check.op, ": out: got none, expected a tensor");
    check.real_output("out", *part.out, {rows, n});
}

// Calls f(format, first, n) for adjacent parts whose formats have the same functions.
template <typename F> void for_formats(const LinearPart *parts, int n_parts, const F &f) {
    for (int first = 0, end = 0; first < n_parts; first = end) {
        const LinearFormat &format = *parts[first].weight->format;
        const auto is_same = [&](const LinearFormat &other) {
            return other.run == format.run && other.run_groups == format.run_groups;
        };
        for (end = first + 1; end < n_parts && is_same(*parts[end].weight->format);) {
            ++end;
        }
        f(format, first, end - first);
    }
}

// Memory of a weight that is stored by rows: of the buffer if the layouts match, otherwise its own.
void allocate_rows(const device::Stream &stream, const LinearRowLayout &layout,
                   LinearBuffer *buffer, int64_t first_row, LinearWeight *weight) {
    LinearBuffer own;
    own.rows = weight->out_features;
    const bool fits = buffer != nullptr &&
                      (!buffer->bytes.defined() || (buffer->bytes.dtype() == layout.dtype &&
                                                    buffer->bytes.size(1) == layout.row_elements &&
                                                    buffer->scales.defined() == layout.has_scales));
    LinearBuffer &target = fits ? *buffer : own;
    if (!target.bytes.defined()) {
        const auto create = [&](const Shape &shape, DType dtype) {
            return Tensor::create(shape, dtype, stream.type(), stream.device_id());
        };
        target.bytes = create({target.rows, layout.row_elements}, layout.dtype);
        target.scales = layout.has_scales ? create({target.rows}, LLAISYS_DTYPE_F32) : Tensor();
    }
    const int64_t first = fits ? first_row : 0;
    const int64_t last = first + weight->out_features;
    weight->bytes = target.bytes.slice(0, first, last);
    weight->scales = layout.has_scales ? target.scales.slice(0, first, last) : Tensor();
}

} // namespace

bool LinearWeight::lies_in_rows(const device::Stream &stream) {
    return stream.type() != LLAISYS_DEVICE_CPU;
}

DType LinearWeight::dtype() const { return format->dtype; }

int64_t LinearWeight::bytes_on(DeviceType device, DType dtype, int64_t out_features,
                               int64_t in_features) {
    require(is_weight(dtype), "linear: dtype must be that of a weight, got ", name_of(dtype));
    require(out_features >= 0 && in_features >= 0, "linear: sizes must not be negative, got ",
            out_features, " and ", in_features);
    bytes_of(dtype, in_features); // throws where rows are not whole blocks
    constexpr int64_t kMost = int64_t(1) << 31;
    require(out_features < kMost && in_features < kMost, "linear: sizes must be below ", kMost,
            ", got ", out_features, " and ", in_features);
    if (device == LLAISYS_DEVICE_CPU) {
        return linear_bytes_cpu(dtype, out_features, in_features);
    }
    if (!is_quantised(dtype)) {
        return bytes_of(dtype, out_features * in_features);
    }
    return out_features * quant_row_layout(dtype, false).row_bytes(in_features);
}

LinearWeight LinearWeight::pack(const device::Stream &stream, const Tensor &weight,
                                LinearBuffer *buffer, int64_t first_row) {
    const Checks check{"linear_weight", stream};
    if (!weight.defined() || weight.device() != LLAISYS_DEVICE_CPU) {
        check.device("weight", weight);
    }
    LinearWeight result;
    result.format = &format_of(check, weight.dtype());
    check.ndim("weight", weight, 2);
    check.dense_rows("weight", weight);
    result.out_features = weight.size(0);
    result.in_features = weight.size(1);
    if (result.format->row_layout != nullptr) {
        allocate_rows(stream, result.format->row_layout(weight), buffer, first_row, &result);
    }
    result.format->pack(stream, weight, &result);
    if (weight.is_mapped()) {
        weight.storage()->drop_pages(); // only the packed copy is read from here on
    }
    return result;
}

void linear(const device::Stream &stream, const Tensor &in, const LinearPart *parts, int n_parts,
            const Tensor *rows) {
    const Checks check{"linear", stream};
    check.real_rows("in", in, 2);
    require(n_parts == 0 || (n_parts > 0 && parts != nullptr), "linear: parts: got ", n_parts,
            ", expected a list of parts");
    if (rows != nullptr) {
        check.vector("rows", *rows, LLAISYS_DTYPE_I32, rows->size(0));
        check.index_range("rows", *rows, in.size(0));
    }
    const int64_t r = rows != nullptr ? rows->size(0) : in.size(0);
    for (int p = 0; p < n_parts; ++p) {
        check_part(check, parts[p], r, in.size(1));
    }
    const LinearGroup all{0, r, parts};
    for_formats(parts, n_parts, [&](const LinearFormat &format, int first, int n) {
        if (format.run != nullptr) {
            return format.run(stream, in, parts + first, n, rows);
        }
        const int32_t *index = rows != nullptr ? rows->as<int32_t>() : nullptr;
        format.run_groups(stream, in, index, &all, 1, first, n);
    });
}

void linear_groups(const device::Stream &stream, const Tensor &in, const int32_t *rows,
                   const LinearGroup *groups, int64_t n_groups, int n_parts) {
    const Checks check{"linear_groups", stream};
    check.real_rows("in", in, 2);
    for (int64_t g = 0; g < n_groups; ++g) {
        for (int p = 0; p < n_parts; ++p) {
            const LinearPart &part = groups[g].parts[p];
            check_part(check, part, part.out != nullptr ? part.out->size(0) : 0, in.size(1));
            const int64_t first = groups[g].first - groups[g].out_first;
            require(groups[g].out_first >= 0 && first >= 0 && groups[g].count >= 0 &&
                        first + groups[g].count <= part.out->size(0),
                    check.op, ": group ", g, ": got rows ", first, " to ", first + groups[g].count,
                    ", expected rows of out, ", part.out->size(0));
        }
    }
    if (n_groups == 0) {
        return;
    }
    for_formats(groups[0].parts, n_parts, [&](const LinearFormat &format, int first, int n) {
        if (format.run_groups == nullptr) {
            check.no_kernel();
        }
        format.run_groups(stream, in, rows, groups, n_groups, first, n);
    });
}

void linear_add(const device::Stream &stream, const Tensor &out, const Tensor &in,
                const LinearWeight &weight, const Tensor *bias) {
    const Checks check{"linear_add", stream};
    check.dtype("out", out, LLAISYS_DTYPE_F32);
    check.real_rows("in", in, 2);
    check_part(check, {&weight, bias, &out}, in.size(0), in.size(1));
    if (weight.format->add == nullptr) {
        check.no_kernel();
    }
    weight.format->add(stream, out, in, weight, bias);
}

void linear_rows(const device::Stream &stream, const Tensor &out, const Tensor &index,
                 const LinearWeight &weight) {
    const Checks check{"linear_rows", stream};
    require(weight.defined(), "linear_rows: weight: got none, expected a packed weight");
    check.device("weight", weight.bytes);
    check.real_output("out", out, {out.size(0), weight.in_features});
    check.contiguous("out", out);
    check.vector("index", index, LLAISYS_DTYPE_I64, out.size(0));
    check.index_range("index", index, weight.out_features);
    weight.format->rows(stream, out, index, weight);
}

} // namespace llaisys::ops
