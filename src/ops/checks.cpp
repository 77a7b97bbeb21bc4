#include "ops/checks.hpp"

namespace llaisys::ops {

namespace {

template <typename... Args>
[[noreturn]] void fault(const char *op, const char *argument, const Args &...args) {
    fail(LLAISYS_ERROR_INVALID, op, ": ", argument, ": ", args...);
}

template <typename T>
void check_range(const char *op, const char *argument, const T *values, int64_t n, int64_t limit) {
    for (int64_t i = 0; i < n; ++i) {
        if (values[i] < 0 || values[i] >= limit) {
            fault(op, argument, "got ", values[i], " at ", i, ", expected 0 <= value < ", limit);
        }
    }
}

} // namespace

void Checks::device(const char *argument, const Tensor &tensor) const {
    if (!tensor.defined()) {
        fault(op, argument, "got no tensor, expected one");
    }
    if (tensor.device() != stream.type() || tensor.device_id() != stream.device_id()) {
        fault(op, argument, "got device ", int(tensor.device()), ":", tensor.device_id(),
              ", expected ", stream.runtime().name, ":", stream.device_id());
    }
}

void Checks::real(const char *argument, const Tensor &tensor) const {
    if (!is_activation(tensor.dtype())) {
        fault(op, argument, "got dtype ", name_of(tensor.dtype()), ", expected f32, f16 or bf16");
    }
}

void Checks::dtype(const char *argument, const Tensor &tensor, DType expected) const {
    if (tensor.dtype() != expected) {
        fault(op, argument, "got dtype ", name_of(tensor.dtype()), ", expected ",
              name_of(expected));
    }
}

void Checks::ndim(const char *argument, const Tensor &tensor, int expected) const {
    if (tensor.ndim() != expected) {
        fault(op, argument, "got shape ", tensor.shape().text(), ", expected ", expected,
              " dimensions");
    }
}

void Checks::shape(const char *argument, const Tensor &tensor,
                   std::initializer_list<int64_t> expected) const {
    bool same = tensor.ndim() == int(expected.size());
    for (int dim = 0; same && dim < tensor.ndim(); ++dim) {
        same = tensor.size(dim) == expected.begin()[dim];
    }
    if (!same) {
        fault(op, argument, "got shape ", tensor.shape().text(), ", expected ",
              Shape(expected).text());
    }
}

void Checks::contiguous(const char *argument, const Tensor &tensor) const {
    if (!tensor.is_contiguous()) {
        fault(op, argument, "got strides ", tensor.strides().text(), " for shape ",
              tensor.shape().text(), ", expected a contiguous tensor");
    }
}

void Checks::dense_rows(const char *argument, const Tensor &tensor) const {
    if (!tensor.has_dense_rows()) {
        fault(op, argument, "got strides ", tensor.strides().text(), " for shape ",
              tensor.shape().text(), ", expected a dense last dimension");
    }
}

void Checks::writable(const char *argument, const Tensor &tensor) const {
    if (tensor.is_mapped()) {
        fault(op, argument, "got a mapped file, which is read-only, expected memory");
    }
}

void Checks::real_rows(const char *argument, const Tensor &tensor, int dims) const {
    device(argument, tensor);
    real(argument, tensor);
    ndim(argument, tensor, dims);
    dense_rows(argument, tensor);
}

void Checks::real_rows(const char *argument, const Tensor &tensor,
                       std::initializer_list<int64_t> expected) const {
    real_rows(argument, tensor, int(expected.size()));
    shape(argument, tensor, expected);
}

void Checks::real_output(const char *argument, const Tensor &tensor, int dims) const {
    real_rows(argument, tensor, dims);
    writable(argument, tensor);
}

void Checks::real_output(const char *argument, const Tensor &tensor,
                         std::initializer_list<int64_t> expected) const {
    real_output(argument, tensor, int(expected.size()));
    shape(argument, tensor, expected);
}

void Checks::dense(const char *argument, const Tensor &tensor, DType dtype_expected,
                   std::initializer_list<int64_t> expected) const {
    device(argument, tensor);
    dtype(argument, tensor, dtype_expected);
    shape(argument, tensor, expected);
    contiguous(argument, tensor);
}

void Checks::matrix(const char *argument, const Tensor &tensor, DType dtype_expected) const {
    device(argument, tensor);
    dtype(argument, tensor, dtype_expected);
    ndim(argument, tensor, 2);
    contiguous(argument, tensor);
}

void Checks::index_range(const char *argument, const Tensor &index, int64_t limit) const {
    if (index.device() != LLAISYS_DEVICE_CPU) {
        return; // the values cannot be seen from here
    }
    switch (index.dtype()) {
    case LLAISYS_DTYPE_I32:
        return check_range(op, argument, index.as<int32_t>(), index.elements(), limit);
    case LLAISYS_DTYPE_I64:
        return check_range(op, argument, index.as<int64_t>(), index.elements(), limit);
    default:
        fail(LLAISYS_ERROR_INTERNAL, op, ": ", argument, ": got dtype ", name_of(index.dtype()),
             ", expected i32 or i64");
    }
}

void Checks::no_kernel() const {
    fail(LLAISYS_ERROR_UNSUPPORTED, op, ": has no kernel for device ", stream.runtime().name);
}

} // namespace llaisys::ops
