#include "parallel/reduce.hpp"

#include <algorithm>
#include <iterator>
#include <type_traits>

namespace llaisys::parallel {

namespace {

using function::ReduceOpType;

constexpr int64_t kBlock = 512; // elements per pass; their partial results fit into L1

// Accumulator type: f32 for floats, unsigned for integers (overflow wraps).
template <typename T>
using Wide =
    std::conditional_t<std::is_integral_v<T>,
                       std::make_unsigned_t<std::conditional_t<std::is_integral_v<T>, T, int>>,
                       float>;

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

template <typename T> bool is_below(Wide<T> a, Wide<T> b) {
    if constexpr (std::is_integral_v<T>) {
        return T(a) < T(b);
    } else {
        return a < b;
    }
}

template <typename T, ReduceOpType kOp> Wide<T> combine(Wide<T> sum, Wide<T> value) {
    if constexpr (kOp == ReduceOpType::kProd) {
        return sum * value;
    } else if constexpr (kOp == ReduceOpType::kMin) {
        return is_below<T>(value, sum) ? value : sum;
    } else if constexpr (kOp == ReduceOpType::kMax) {
        return is_below<T>(sum, value) ? value : sum;
    } else {
        return sum + value;
    }
}

template <typename T> Wide<T> average(Wide<T> sum, int n) {
    if constexpr (std::is_integral_v<T>) {
        return Wide<T>(T(sum) / T(n));
    } else {
        return sum / float(n);
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
                sums[i] = combine<T, kOp>(sums[i], widen(next[i]));
            }
        }
        for (int64_t i = 0; i < n; ++i) {
            const Wide<T> value =
                kOp == ReduceOpType::kAvg ? average<T>(sums[i], n_inputs) : sums[i];
            out[begin + i] = narrow<T>(value);
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
