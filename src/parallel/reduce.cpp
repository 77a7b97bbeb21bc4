#include "parallel/reduce.hpp"

#include "parallel/reduce_math.hpp"

#include <algorithm>
#include <iterator>

namespace llaisys::parallel {

namespace {

using function::ReduceOpType;

constexpr int64_t kBlock = 512; // elements per pass; their partial results fit into L1

template <typename T> Wide<T> widen(T value) {
    if constexpr (std::is_integral_v<T>) {
        return Wide<T>(value);
    } else {
        return to_f32(value);
    }
}

template <typename T> T narrow(Wide<T> value) {
    if constexpr (std::is_integral_v<T>) {
        return T(value);
    } else {
        return from_f32<T>(value);
    }
}

template <typename T, ReduceOpType kOp>
void reduce_all(T *out, const void *const *in, int n_inputs, int64_t count) {
    Wide<T> sums[kBlock];
    for (int64_t begin = 0; begin < count; begin += kBlock) {
        const int64_t n = std::min(kBlock, count - begin);
        const T *first = static_cast<const T *>(in[0]) + begin;
        for (int64_t i = 0; i < n; ++i) {
            sums[i] = widen(first[i]);
        }
        for (int rank = 1; rank < n_inputs; ++rank) {
            const T *next = static_cast<const T *>(in[rank]) + begin;
            for (int64_t i = 0; i < n; ++i) {
                sums[i] = combine<T>(sums[i], widen(next[i]), kOp);
            }
        }
        for (int64_t i = 0; i < n; ++i) {
            out[begin + i] = narrow<T>(finish<T>(sums[i], kOp, n_inputs));
        }
    }
}

template <typename T>
void reduce_as(T *out, const void *const *in, int n_inputs, int64_t count, ReduceOpType op) {
    switch (op) {
    case ReduceOpType::kSum:
        return reduce_all<T, ReduceOpType::kSum>(out, in, n_inputs, count);
    case ReduceOpType::kProd:
        return reduce_all<T, ReduceOpType::kProd>(out, in, n_inputs, count);
    case ReduceOpType::kMin:
        return reduce_all<T, ReduceOpType::kMin>(out, in, n_inputs, count);
    case ReduceOpType::kMax:
        return reduce_all<T, ReduceOpType::kMax>(out, in, n_inputs, count);
    case ReduceOpType::kAvg:
        return reduce_all<T, ReduceOpType::kAvg>(out, in, n_inputs, count);
    }
}

} // namespace

const char *reduce_op_name(ReduceOpType op) {
    static const char *const names[] = {"sum", "prod", "min", "max", "avg"};
    return size_t(op) < std::size(names) ? names[size_t(op)] : "invalid";
}

bool is_reducible(DType dtype) {
    return is_activation(dtype) || dtype == LLAISYS_DTYPE_I32 || dtype == LLAISYS_DTYPE_I64;
}

void reduce(void *out, const void *const *in, int n_inputs, int64_t count, DType dtype,
            ReduceOpType op) {
    if (dtype == LLAISYS_DTYPE_I32) {
        return reduce_as(static_cast<int32_t *>(out), in, n_inputs, count, op);
    }
    if (dtype == LLAISYS_DTYPE_I64) {
        return reduce_as(static_cast<int64_t *>(out), in, n_inputs, count, op);
    }
    visit_real(dtype, [&](auto type) {
        using T = decltype(type);
        reduce_as(static_cast<T *>(out), in, n_inputs, count, op);
    });
}

} // namespace llaisys::parallel
