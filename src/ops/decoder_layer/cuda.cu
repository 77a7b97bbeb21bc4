// The steps of a decoder layer on 16-bit weights.
//
//   to 16 rows   norm inside the product, swiglu or rotation and cache in its epilogue (few_rows.cuh);
//                where few_rows.cuh does not norm, a norm kernel before
//   more         norm, one cuBLASLt product over the weights that lie together, and for attention
//                a kernel that adds the biases, turns queries and keys and fills the cache
//
// Bound by reading the weights up to 16 rows.
#include "ops/decoder_layer/cuda.hpp"

#include "ops/cuda/few_rows.cuh"
#include "ops/cuda/norm_rows.cuh"
#include "ops/cuda/visit.cuh"
#include "ops/decoder_layer/cuda_uses.cuh"
#include "ops/rms_norm/op.hpp"

#include <algorithm>

namespace llaisys::ops {

namespace {

constexpr int kFinishThreads = 512; // at most
constexpr int kMaxPairs = 512;      // of a head

// Eight neighbouring values from i on, which lie on 16 bytes; zeros where there are none.
__device__ __forceinline__ void load_eight(const cuda::Reals &from, int64_t i, float (&to)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        to[j] = 0.0f;
    }
    if (from.data == nullptr) {
        return;
    }
    if (from.dtype == LLAISYS_DTYPE_F32) {
        const auto *at =
            reinterpret_cast<const float4 *>(static_cast<const float *>(from.data) + i);
        const float4 low = at[0], high = at[1];
        to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
        to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
        return;
    }
    const uint4 bits =
        *reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(from.data) + i);
    const bool is_bf16 = from.dtype == LLAISYS_DTYPE_BF16;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        to[j] = is_bf16 ? cuda::to_float(reinterpret_cast<const cuda::bf16 *>(&bits)[j])
                        : cuda::to_float(reinterpret_cast<const cuda::f16 *>(&bits)[j]);
    }
}

// After a large product: biases, rotation, cache. qkv [n, (heads + 2 kv_heads) * d]; q in place. One
// block a row, 8 pairs a thread, which are on their way while the angles of the row are made. Bound by
// memory: each value is read and written once.
template <typename T>
__global__ void __launch_bounds__(kFinishThreads)
    finish_qkv_kernel(cuda::PairStore<T> pairs, const T *qkv, int64_t ld) {
    constexpr int kPairs = 8;
    __shared__ float2 angles[kMaxPairs];
    cuda::wait_for_input();
    cuda::allow_next();
    const int row = blockIdx.x;
    const int half = pairs.s.d / 2;
    const int a_head = half / kPairs;
    const int n_items = pairs.s.heads() * a_head;
    __align__(16) T low[kPairs], high[kPairs];
    float low_bias[kPairs], high_bias[kPairs];
    T *to = nullptr;
    const auto load = [&](int item) {
        const int head = item / a_head;
        const int pair = item % a_head * kPairs;
        const int section = pairs.s.section_of(head);
        const T *from = qkv + row * ld + head * pairs.s.d + pair;
        *reinterpret_cast<uint4 *>(low) = *reinterpret_cast<const uint4 *>(from);
        *reinterpret_cast<uint4 *>(high) = *reinterpret_cast<const uint4 *>(from + half);
        const int at = (head - pairs.s.first_head(section)) * pairs.s.d + pair;
        const cuda::Reals bias = pairs.s.bias_of(section);
        load_eight(bias, at, low_bias);
        load_eight(bias, at + half, high_bias);
        to = pairs.place(head, pair, row, section == 0 ? 0 : pairs.s.slots[row]);
    };
    if (threadIdx.x < n_items) {
        load(threadIdx.x);
    }
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        pairs.angle(i, row, &angles[i].x, &angles[i].y);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_items; i += blockDim.x) {
        if (i >= blockDim.x) {
            load(i);
        }
        if (to == nullptr) {
            continue;
        }
        const int head = i / a_head;
        const int pair = i % a_head * kPairs;
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            float x = cuda::to_float(low[j]) + low_bias[j];
            float y = cuda::to_float(high[j]) + high_bias[j];
            const float2 angle = angles[pair + j];
            pairs.turn(head, angle.x, angle.y, &x, &y);
            low[j] = cuda::from_float<T>(x);
            high[j] = cuda::from_float<T>(y);
        }
        *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(low);
        *reinterpret_cast<uint4 *>(to + half) = *reinterpret_cast<const uint4 *>(high);
    }
}

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
    if (n <= cuda::most_fused_rows(cuda_stream)) {
        const auto weights = [](const LinearPart &part) {
            return reinterpret_cast<const T *>(part.weight->bytes.data());
        };
        const cuda::QkvUse<T> use{pairs, {weights(q), weights(k), weights(v)}, residual.size(1), 0};
        cuda::run_few_rows<T>(cuda_stream, few_rows_input(stream, residual, norm), use);
        return;
    }
    const LinearPart parts[] = {
        {q.weight, nullptr, q.out}, {k.weight, nullptr, k.out}, {v.weight, nullptr, v.out}};
    rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
    linear(stream, norm.normed, parts, 3);
    const int64_t items = pairs.s.heads() * kv.head_dim / 16;
    const int64_t threads = std::min<int64_t>(kFinishThreads, (items + 31) / 32 * 32);
    cuda::launch(cuda_stream, finish_qkv_kernel<T>, unsigned(n), unsigned(threads), 0, true, pairs,
                 static_cast<const T *>(pairs.q), pairs.q_row);
}

template <typename T>
void mlp_input(const device::Stream &stream, const Tensor &residual, const Norm &norm,
               const LinearPart &gate, const LinearPart &up) {
    cuda::SwigluUse<T> use{};
    use.gate = reinterpret_cast<const T *>(gate.weight->bytes.data());
    use.up = reinterpret_cast<const T *>(up.weight->bytes.data());
    use.n = gate.weight->out_features;
    use.k = residual.size(1);
    use.out = reinterpret_cast<T *>(gate.out->data());
    use.ldo = gate.out->stride(0);
    cuda::run_few_rows<T>(device::cuda_stream_of(stream), few_rows_input(stream, residual, norm),
                          use);
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
        placement.kv.head_dim % 32 != 0 || placement.kv.head_dim > 2 * kMaxPairs ||
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
        up.weight->bytes.dtype() != dtype || gate.out->dtype() != dtype ||
        residual.size(0) > cuda::most_fused_rows(device::cuda_stream_of(stream)) ||
        residual.size(0) == 0) {
        return false;
    }
    cuda::visit_half(
        dtype, [&](auto type) { mlp_input<decltype(type)>(stream, residual, norm, gate, up); });
    return true;
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
