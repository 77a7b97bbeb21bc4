#include "ops/topk/op.hpp"

#include "ops/checks.hpp"

#include <limits>

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

void topk(const device::Stream &stream, const Tensor &index, const Tensor &value,
          const Tensor &values) {
    const Checks check{"topk", stream};
    check.matrix("values", values, LLAISYS_DTYPE_F32);
    const int64_t rows = values.size(0);
    const int64_t n = values.size(1);
    const int64_t k = value.size(1);
    check.dense("value", value, LLAISYS_DTYPE_F32, {rows, k});
    check.writable("value", value);
    require(k >= 1 && k <= n && n <= std::numeric_limits<int32_t>::max(),
            "topk: value: got k = ", k, ", expected 1 <= k <= ", n);
    check.dense("index", index, LLAISYS_DTYPE_I32, {rows, k});
    check.writable("index", index);
    check.dispatch(LLAISYS_KERNELS(topk), index, value, values);
}

} // namespace llaisys::ops
