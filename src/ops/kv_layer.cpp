#include "ops/kv_layer.hpp"

namespace llaisys::ops {

namespace {

bool is_eight_bits(const Tensor &tensor) {
    return tensor.defined() && ops::is_eight_bits(tensor.dtype());
}

void check_eight_bits(const Checks &check, const KvLayer &kv) {
    if (kv.k.dtype() == LLAISYS_DTYPE_F8_E4M3 && check.stream.type() == LLAISYS_DEVICE_CPU) {
        fail(LLAISYS_ERROR_UNSUPPORTED, check.op,
             ": k_cache: got dtype f8_e4m3, which is not built for device ",
             check.stream.runtime().name, ", expected f32, f16, bf16 or i8");
    }
    if (kv.head_dim < 1 || kv.head_dim > kMaxQuantisedHead) {
        fail(LLAISYS_ERROR_INVALID, check.op, ": k_cache: got dtype ", name_of(kv.k.dtype()),
             " and shape ", kv.k.shape().text(), ", expected heads of 1 to ", kMaxQuantisedHead,
             " bytes and ", kKvScaleBytes, " of their scale");
    }
}

} // namespace

bool is_eight_bits(DType dtype) {
    return dtype == LLAISYS_DTYPE_I8 || dtype == LLAISYS_DTYPE_F8_E4M3;
}

bool is_kv_dtype(DType dtype) { return is_activation(dtype) || is_eight_bits(dtype); }

int64_t head_stride(DType dtype, int64_t head_dim) {
    return is_eight_bits(dtype) ? head_dim + kKvScaleBytes : head_dim;
}

KvLayer slot_major(const Tensor &k, const Tensor &v) {
    const int64_t d = k.size(2) - head_stride(k.dtype(), 0);
    return {k.size(0), k.size(1), d, k, v, d};
}

KvLayer slot_major(const Tensor &k, int64_t value_dim) {
    return {k.size(0), k.size(1), k.size(2), k, Tensor(), value_dim};
}

void check_kv(const Checks &check, const KvLayer &kv) {
    const auto check_cache = [&](const char *name, const Tensor &cache) {
        check.device(name, cache);
        if (!is_kv_dtype(cache.dtype()) ||
            (is_eight_bits(cache) || is_eight_bits(kv.k) ? cache.dtype() != kv.k.dtype() : false)) {
            fail(LLAISYS_ERROR_INVALID, check.op, ": ", name, ": got dtype ",
                 name_of(cache.dtype()),
                 ", expected f32, f16 or bf16, or i8 or f8_e4m3 for both caches");
        }
        check.ndim(name, cache, 3);
        check.contiguous(name, cache);
        check.shape(name, cache, {kv.n_slots, kv.n_heads, kv.head_stride()});
    };
    check_cache("k_cache", kv.k);
    if (kv.has_values()) {
        check_cache("v_cache", kv.v);
    } else if (is_eight_bits(kv.k)) {
        fail(LLAISYS_ERROR_UNSUPPORTED, check.op, ": k_cache: got dtype ", name_of(kv.k.dtype()),
             " for keys that contain the values, expected f32, f16 or bf16");
    } else if (kv.value_dim < 1 || kv.value_dim > kv.head_dim) {
        fail(LLAISYS_ERROR_INVALID, check.op, ": k_cache: got values of ", kv.value_dim,
             ", expected 1 to the ", kv.head_dim, " of a key");
    }
    if (is_eight_bits(kv.k)) {
        check_eight_bits(check, kv);
    }
}

void check_has_values(const Checks &check, const KvLayer &kv) {
    if (!kv.has_values()) {
        fail(LLAISYS_ERROR_INVALID, check.op,
             ": got rows of values, expected none: the keys of "
             "this cache contain the values");
    }
}

void check_kv_rows(const Checks &check, const char *name, const Tensor &rows, const KvLayer &kv,
                   int64_t n) {
    if (is_eight_bits(rows) && rows.dtype() == kv.k.dtype()) {
        check.device(name, rows);
        check.shape(name, rows, {n, kv.n_heads, kv.head_stride()});
        check.contiguous(name, rows);
        return;
    }
    check.real_rows(name, rows, {n, kv.n_heads, kv.head_dim});
}

} // namespace llaisys::ops
