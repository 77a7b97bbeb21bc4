#include "ops/argmax/op.hpp"

#include "ops/checks.hpp"

namespace llaisys::ops {

void argmax(const device::Stream &stream, const Tensor &max_index, const Tensor &max_value,
            const Tensor &values, const ArgmaxOnHost &host) {
    const Checks check{"argmax", stream};
    check.real_rows("values", values, 2);
    check.contiguous("values", values);
    const int64_t rows = values.size(0);
    require(values.size(1) > 0, "argmax: values: got shape ", values.shape(),
            ", expected at least one column");
    check.vector("max_index", max_index, LLAISYS_DTYPE_I64, rows);
    check.writable("max_index", max_index);
    check.vector("max_value", max_value, values.dtype(), rows);
    check.writable("max_value", max_value);
    check.dispatch(LLAISYS_KERNELS(argmax), max_index, max_value, values, host);
}

} // namespace llaisys::ops
