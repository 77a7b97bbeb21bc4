#include "ops/kv_store/op.hpp"

#include "ops/kv_store/cpu.hpp"
#include "ops/kv_store/cuda.hpp"

namespace llaisys::ops {

void kv_store(const device::Stream &stream, const KvLayer &kv, const Tensor &k, const Tensor *v,
              const Tensor &slots) {
    const Checks check{"kv_store", stream};
    check_kv(check, kv);
    check.writable("k_cache", kv.k);
    check.writable("v_cache", kv.v);
    check.real_rows("values", k, 3);
    const int64_t n = k.size(0);
    check.shape("values", k, {n, kv.n_heads, kv.head_dim});
    if (v != nullptr) {
        check.real_rows("values", *v, 3);
        check.shape("values", *v, {n, kv.n_heads, kv.head_dim});
    }
    check.vector("slots", slots, LLAISYS_DTYPE_I32, n);
    check.index_range("slots", slots, kv.n_slots);
    switch (stream.type()) {
    case LLAISYS_DEVICE_CPU:
        return kv_store_cpu(stream, kv, k, v, slots);
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return kv_store_cuda(stream, kv, k, v, slots);
#endif
    default:
        check.no_kernel();
    }
}

} // namespace llaisys::ops
