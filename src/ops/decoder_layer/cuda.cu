// The steps of a decoder layer on 16-bit weights.
//
//   to 16 rows   norm inside the product, swiglu or rotation and cache in its epilogue (few_rows.cuh);
//                where few_rows.cuh does not norm, a norm kernel before
//   to 96        norm, then a product with the same epilogues (wide_ring.cuh), where it is the fastest
//   more         norm, one cuBLASLt product over the weights that lie together, and for attention
//                a kernel that adds the biases, turns queries and keys and fills the cache; swiglu
//                by itself, or for rows enough to fill its tiles inside gated_product.cuh
//
// Bound by reading the weights up to 64 rows, and by what a processor takes in from there on.
#include "ops/decoder_layer/cuda.hpp"

#include "ops/cuda/few_rows.cuh"
#include "ops/cuda/gated_product.cuh"
#include "ops/cuda/norm_rows.cuh"
#include "ops/cuda/visit.cuh"
#include "ops/cuda/wide_ring.cuh"
#include "ops/decoder_layer/cuda_finish.cuh"
#include "ops/rms_norm/op.hpp"

namespace llaisys::ops {

namespace {

bool is_on_16_bytes(const Tensor &tensor) {
    return reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0;
}

bool is_bias_on_16_bytes(const LinearPart &part) {
    return part.bias == nullptr || is_on_16_bytes(*part.bias);
}

bool is_fast(const Tensor &residual, const Norm &norm, const LinearPart &part) {
    const DType dtype = part.weight->bytes.dtype();
    return dtype != LLAISYS_DTYPE_F32 && norm.normed.dtype() == dtype &&
           residual.dtype() == LLAISYS_DTYPE_F32 && residual.size(1) % 8 == 0 &&
           residual.stride(0) % 4 == 0 && is_on_16_bytes(residual) && is_on_16_bytes(norm.normed) &&
           is_on_16_bytes(part.weight->bytes);
}

// What a product of few rows reads: the residual row itself, or normalised rows.
cuda::FewRowsInput few_rows_input(const device::Stream &stream, const Tensor &residual,
                                  const Norm &norm) {
    cuda::FewRowsInput in{};
    in.m = int(residual.size(0));
    in.k = int(residual.size(1));
    if (cuda::can_norm_inside(device::cuda_stream_of(stream), in.m, in.k) &&
        norm.weight.dtype() == LLAISYS_DTYPE_F32 && is_on_16_bytes(norm.weight)) {
        in.residual = residual.as<float>();
        in.ld_residual = residual.stride(0);
        in.norm_weight = norm.weight.as<float>();
        in.epsilon = norm.epsilon;
    } else {
        rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
        in.x = norm.normed.data();
        in.ldx = norm.normed.stride(0);
    }
    return in;
}

// Normalises the rows, then multiplies them by wide_ring.cuh; false where that cannot or is not the fastest.
template <typename T, typename Use>
bool run_wide(const device::Stream &stream, const Tensor &residual, const Norm &norm,
              const Use &use, const cuda::WideTuning &tuning) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    cuda::FewRowsInput in{};
    in.m = int(residual.size(0));
    in.k = int(residual.size(1));
    in.x = norm.normed.data();
    in.ldx = norm.normed.stride(0);
    if (cuda_stream.is_exact || !cuda::can_wide_ring<T>(cuda_stream, in, use.atoms(), tuning)) {
        return false;
    }
    rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
    cuda::run_wide_ring<T>(cuda_stream, in, use, tuning);
    return true;
}

template <typename T>
void attention_input(const device::Stream &stream, const Tensor &residual, const Norm &norm,
                     const LinearPart &q, const LinearPart &k, const LinearPart &v,
                     const Placement &placement) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const KvLayer &kv = placement.kv;
    const int64_t n = residual.size(0);
    cuda::PairStore<T> pairs{};
    pairs.s = {int(q.out->size(1) / kv.head_dim),
               int(kv.n_heads),
               int(kv.head_dim),
               {cuda::reals(q.bias), cuda::reals(k.bias), cuda::reals(v.bias)},
               placement.positions.as<int64_t>(),
               placement.inv_freq.as<float>(),
               placement.slots.as<int32_t>(),
               kv.n_slots};
    pairs.q = reinterpret_cast<T *>(q.out->data());
    pairs.q_row = q.out->stride(0);
    pairs.k_cache = reinterpret_cast<T *>(kv.k.data());
    pairs.v_cache = reinterpret_cast<T *>(kv.v.data());
    const auto weights = [](const LinearPart &part) {
        return reinterpret_cast<const T *>(part.weight->bytes.data());
    };
    const cuda::QkvUse<T> use{pairs, {weights(q), weights(k), weights(v)}, residual.size(1), 0};
    if (n <= cuda::most_fused_rows(cuda_stream)) {
        cuda::run_few_rows<T>(cuda_stream, few_rows_input(stream, residual, norm), use);
        return;
    }
    if (run_wide<T>(stream, residual, norm, use, cuda::wide_attention_input(n, residual.size(1)))) {
        return;
    }
    const LinearPart parts[] = {
        {q.weight, nullptr, q.out}, {k.weight, nullptr, k.out}, {v.weight, nullptr, v.out}};
    rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
    linear(stream, norm.normed, parts, 3);
    cuda::finish_qkv<T>(cuda_stream, pairs, pairs.q, pairs.q_row, n);
}

// Norm, then the product that never writes gate and up; false where it cannot or is not the fastest.
template <typename T>
bool run_gated(const device::Stream &stream, const Tensor &residual, const Norm &norm,
               const cuda::SwigluUse<T> &use) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    if (cuda_stream.is_exact || !cuda::has_gated_product(cuda_stream) ||
        !cuda::fills_gated_tiles(cuda_stream, residual.size(0), use.n) ||
        norm.normed.stride(0) % 8 != 0 || use.n % 8 != 0 || use.ldo % 8 != 0 ||
        reinterpret_cast<uintptr_t>(use.out) % 16 != 0) {
        return false;
    }
    rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
    cuda::run_gated_product<T>(
        cuda_stream, use.out, use.ldo, reinterpret_cast<const T *>(norm.normed.data()),
        norm.normed.stride(0), use.gate, use.up, residual.size(0), use.n, use.k);
    return true;
}

// False where the plain operators must do.
template <typename T>
bool mlp_input(const device::Stream &stream, const Tensor &residual, const Norm &norm,
               const LinearPart &gate, const LinearPart &up) {
    cuda::SwigluUse<T> use{};
    use.gate = reinterpret_cast<const T *>(gate.weight->bytes.data());
    use.up = reinterpret_cast<const T *>(up.weight->bytes.data());
    use.n = gate.weight->out_features;
    use.k = residual.size(1);
    use.out = reinterpret_cast<T *>(gate.out->data());
    use.ldo = gate.out->stride(0);
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    if (residual.size(0) > cuda::most_fused_rows(cuda_stream)) {
        return run_wide<T>(stream, residual, norm, use,
                           cuda::wide_mlp_input(residual.size(0), use.k)) ||
               run_gated<T>(stream, residual, norm, use);
    }
    cuda::run_few_rows<T>(cuda_stream, few_rows_input(stream, residual, norm), use);
    return true;
}

template <typename T>
void head(const device::Stream &stream, const Tensor &logits, const Tensor &residual,
          const Norm &norm, const LinearWeight &weight, const Tensor &rows) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const int64_t m = rows.size(0);
    const int64_t k = residual.size(1);
    const int64_t n = weight.out_features;
    if (m <= cuda::most_fused_rows(cuda_stream) && cuda::can_norm_inside(cuda_stream, m, k)) {
        cuda::FewRowsInput in{};
        in.m = int(m);
        in.k = int(k);
        in.residual = residual.as<float>();
        in.ld_residual = residual.stride(0);
        in.rows = rows.as<int32_t>();
        in.norm_weight = norm.weight.as<float>();
        in.epsilon = norm.epsilon;
        cuda::StoreRows<T> use{};
        use.w = reinterpret_cast<const T *>(weight.bytes.data());
        use.n = n;
        use.k = k;
        use.bias = cuda::reals(nullptr);
        use.out = cuda::reals(logits);
        use.ldo = logits.stride(0);
        cuda::run_few_rows<T>(cuda_stream, in, use);
        return;
    }
    cuda::norm_rows<T>(cuda_stream, reinterpret_cast<T *>(norm.normed.data()),
                       norm.normed.stride(0), residual.as<float>(), residual.stride(0),
                       rows.as<int32_t>(), norm.weight.as<float>(), m, k, norm.epsilon);
    const LinearPart part{&weight, nullptr, &logits};
    linear(stream, norm.normed.slice(0, 0, m), &part, 1);
}

} // namespace

bool attention_input_cuda(const device::Stream &stream, const Tensor &residual, const Norm &norm,
                          const LinearPart &q, const LinearPart &k, const LinearPart &v,
                          const Placement &placement) {
    const DType dtype = q.weight->bytes.dtype();
    const auto lies_behind = [](const Tensor &a, const Tensor &b) {
        return b.data() == a.data() + bytes_of(a.dtype(), a.size(1)) && a.stride(0) == b.stride(0);
    };
    if (!is_fast(residual, norm, q) || !is_fast(residual, norm, k) || !is_fast(residual, norm, v) ||
        k.weight->bytes.dtype() != dtype || v.weight->bytes.dtype() != dtype ||
        q.out->dtype() != dtype || placement.kv.k.dtype() != dtype ||
        placement.kv.head_dim != 2 * placement.inv_freq.size(0) ||
        placement.kv.head_dim % 32 != 0 || placement.kv.head_dim > 2 * cuda::kMaxPairs ||
        (residual.size(0) > cuda::most_fused_rows(device::cuda_stream_of(stream)) &&
         !(lies_behind(*q.out, *k.out) && lies_behind(*k.out, *v.out) && is_on_16_bytes(*q.out) &&
           q.out->stride(0) % 8 == 0 && is_on_16_bytes(placement.kv.k) &&
           is_on_16_bytes(placement.kv.v) && is_bias_on_16_bytes(q) && is_bias_on_16_bytes(k) &&
           is_bias_on_16_bytes(v)))) {
        return false;
    }
    if (residual.size(0) == 0) {
        return true;
    }
    cuda::visit_half(dtype, [&](auto type) {
        attention_input<decltype(type)>(stream, residual, norm, q, k, v, placement);
    });
    return true;
}

bool mlp_input_cuda(const device::Stream &stream, const Tensor &residual, const Norm &norm,
                    const LinearPart &gate, const LinearPart &up) {
    const DType dtype = gate.weight->bytes.dtype();
    if (!is_fast(residual, norm, gate) || !is_fast(residual, norm, up) ||
        up.weight->bytes.dtype() != dtype || gate.out->dtype() != dtype || residual.size(0) == 0) {
        return false;
    }
    bool is_done = false;
    cuda::visit_half(dtype, [&](auto type) {
        is_done = mlp_input<decltype(type)>(stream, residual, norm, gate, up);
    });
    return is_done;
}

bool head_cuda(const device::Stream &stream, const Tensor &logits, const Tensor &residual,
               const Norm &norm, const LinearWeight &weight, const Tensor &rows) {
    const LinearPart part{&weight, nullptr, &logits};
    if (!is_fast(residual, norm, part) || rows.size(0) == 0 ||
        logits.dtype() != LLAISYS_DTYPE_F32 || norm.weight.dtype() != LLAISYS_DTYPE_F32 ||
        !is_on_16_bytes(norm.weight) || norm.normed.stride(0) % 4 != 0) {
        return false;
    }
    cuda::visit_half(weight.bytes.dtype(), [&](auto type) {
        head<decltype(type)>(stream, logits, residual, norm, weight, rows);
    });
    return true;
}

} // namespace llaisys::ops
