#include "ops/linear/op.hpp"

#include "ops/checks.hpp"
#include "ops/linear/cpu.hpp"

namespace llaisys::ops {

namespace {

void check_part(const Checks &check, const LinearPart &part, int64_t rows, int64_t in_features) {
    if (part.weight == nullptr || !part.weight->defined()) {
        fail(LLAISYS_ERROR_INVALID, check.op, ": weight: got none, expected a packed weight");
    }
    check.device("weight", part.weight->packed());
    if (part.weight->in_features() != in_features) {
        fail(LLAISYS_ERROR_INVALID, check.op, ": in: got ", in_features,
             " columns, expected the in_features of the weight, ", part.weight->in_features());
    }
    const int64_t n = part.weight->out_features();
    if (part.bias != nullptr) {
        check.real_rows("bias", *part.bias, 1);
        check.shape("bias", *part.bias, {n});
    }
    if (part.out == nullptr) {
        fail(LLAISYS_ERROR_INVALID, check.op, ": out: got none, expected a tensor");
    }
    check.real_output("out", *part.out, 2);
    check.shape("out", *part.out, {rows, n});
}

} // namespace

LinearWeight LinearWeight::pack(const device::Stream &stream, const Tensor &weight) {
    const Checks check{"linear_weight", stream};
    check.real_rows("weight", weight, 2);
    LinearWeight result;
    result.out_features_ = weight.size(0);
    result.in_features_ = weight.size(1);
    result.dtype_ = weight.dtype();
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        result.packed_ = linear_pack_cpu(stream, weight);
        break;
    default:
        check.no_kernel();
    }
    if (weight.is_mapped()) {
        weight.storage()->drop_pages(); // the copy is what will be read
    }
    return result;
}

void linear(const device::Stream &stream, const Tensor &in, const LinearPart *parts, int n_parts,
            const Tensor *rows) {
    const Checks check{"linear", stream};
    check.real_rows("in", in, 2);
    if (n_parts < 0 || (n_parts > 0 && parts == nullptr)) {
        fail(LLAISYS_ERROR_INVALID, "linear: parts: got ", n_parts, ", expected a list of parts");
    }
    if (rows != nullptr) {
        check.device("rows", *rows);
        check.ndim("rows", *rows, 1);
        check.vector("rows", *rows, LLAISYS_DTYPE_I32, rows->size(0));
        check.index_range("rows", *rows, in.size(0));
    }
    const int64_t r = rows != nullptr ? rows->size(0) : in.size(0);
    for (int p = 0; p < n_parts; ++p) {
        check_part(check, parts[p], r, in.size(1));
    }
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return linear_cpu(stream, in, parts, n_parts, rows);
    default:
        check.no_kernel();
    }
}

void linear_rows(const device::Stream &stream, const Tensor &out, const Tensor &index,
                 const LinearWeight &weight) {
    const Checks check{"linear_rows", stream};
    if (!weight.defined()) {
        fail(LLAISYS_ERROR_INVALID, "linear_rows: weight: got none, expected a packed weight");
    }
    check.device("weight", weight.packed());
    check.real_output("out", out, 2);
    check.contiguous("out", out);
    check.shape("out", out, {out.size(0), weight.in_features()});
    check.vector("index", index, LLAISYS_DTYPE_I64, out.size(0));
    check.index_range("index", index, weight.out_features());
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return linear_rows_cpu(stream, out, index, weight);
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
