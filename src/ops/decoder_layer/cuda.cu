// The steps of a decoder layer on 16-bit weights.
//
//   1 row        norm inside the product, swiglu or rotation and cache in its epilogue (skinny.cuh)
//   2..16 rows   a norm kernel, then the same product
//   more         norm, one cuBLASLt product over the weights that lie together, and for attention
//                a kernel that adds the biases, turns queries and keys and fills the cache
//
// Bound by reading the weights up to 16 rows.
#include "ops/decoder_layer/cuda.hpp"

#include "ops/cuda/skinny.cuh"
#include "ops/cuda/visit.cuh"
#include "ops/rms_norm/op.hpp"

namespace llaisys::ops {

namespace {

constexpr int kThreads = 256;
constexpr int kMaxPairs = 512; // of a head

// The q, k and v sections one behind the other, in heads.
struct Sections {
    int n_heads, kv_heads, d;
    cuda::Reals biases[3]; // data null: none
    const int64_t *positions;
    const float *inv_freq;
    const int32_t *slots;
    int64_t n_slots;

    __device__ __forceinline__ int section_of(int head) const {
        return head < n_heads ? 0 : (head < n_heads + kv_heads ? 1 : 2);
    }
    __device__ __forceinline__ int first_head(int section) const {
        return section == 0 ? 0 : n_heads + (section - 1) * kv_heads;
    }
};

// Puts one pair (i, i + d/2) of a head where it belongs.
template <typename T> struct PairStore {
    Sections s;
    T *q;
    int64_t q_row;
    T *k_cache, *v_cache;

    __device__ __forceinline__ void angle(int pair, int row, float *sin, float *cos) const {
        cuda::turn_of(s.positions[row], s.inv_freq[pair], sin, cos);
    }
    __device__ __forceinline__ void store(int head, int pair, int row, float low, float high,
                                          float sin, float cos) const {
        const int half = s.d / 2;
        const int section = s.section_of(head);
        const int own = head - s.first_head(section);
        const cuda::Reals &bias = s.biases[section];
        if (bias.data != nullptr) {
            low += bias.load(own * s.d + pair);
            high += bias.load(own * s.d + pair + half);
        }
        if (section < 2) {
            const float rotated = low * cos - high * sin;
            high = high * cos + low * sin;
            low = rotated;
        }
        T *to = q + row * q_row + own * s.d;
        if (section > 0) {
            const int64_t slot = s.slots[row];
            if (slot < 0 || slot >= s.n_slots) { // a row that only fills the graph up
                return;
            }
            to = (section == 1 ? k_cache : v_cache) + (slot * s.kv_heads + own) * s.d;
        }
        to[pair] = cuda::from_float<T>(low);
        to[pair + half] = cuda::from_float<T>(high);
    }
};

// 8 pairs of a head: the rows of one half and those of the other.
template <typename T> struct QkvUse {
    PairStore<T> pairs;
    const T *w[3];
    int64_t k;

    __device__ __forceinline__ int units_a_head() const { return pairs.s.d / 16; }
    __device__ __forceinline__ const T *weights(int unit, int group) const {
        const int head = unit / units_a_head();
        const int section = pairs.s.section_of(head);
        const int row = (head - pairs.s.first_head(section)) * pairs.s.d + group * pairs.s.d / 2 +
                        unit % units_a_head() * 8;
        const T *section_weights = section == 0 ? w[0] : (section == 1 ? w[1] : w[2]);
        return section_weights + int64_t(row) * k;
    }
    __device__ __forceinline__ int rows(int, int) const { return 8; }
    __device__ __forceinline__ void store(int unit, int i, int row, float low, float high) const {
        const int pair = unit % units_a_head() * 8 + i;
        float sin = 0;
        float cos = 0;
        pairs.angle(pair, row, &sin, &cos);
        pairs.store(unit / units_a_head(), pair, row, low, high, sin, cos);
    }
};

// 8 outputs of gate and the same of up.
template <typename T> struct SwigluUse {
    const T *gate, *up;
    int64_t n, k;
    T *out;
    int64_t ldo;

    __device__ __forceinline__ const T *weights(int unit, int group) const {
        return (group == 0 ? gate : up) + int64_t(unit) * 8 * k;
    }
    __device__ __forceinline__ int rows(int unit, int) const {
        const int64_t left = n - int64_t(unit) * 8;
        return left < 8 ? int(left) : 8;
    }
    __device__ __forceinline__ void store(int unit, int i, int row, float low, float high) const {
        const int64_t at = int64_t(unit) * 8 + i;
        if (at < n) {
            out[row * ldo + at] = cuda::from_float<T>(high * low / (1.0f + expf(-low)));
        }
    }
};

// After a large product: biases, rotation, cache. qkv [n, (heads + 2 kv_heads) * d]; q in place.
template <typename T>
__global__ void finish_qkv_kernel(PairStore<T> pairs, const T *qkv, int64_t ld) {
    __shared__ float2 angles[kMaxPairs];
    cuda::wait_for_input();
    cuda::allow_next();
    const int row = blockIdx.x;
    const int half = pairs.s.d / 2;
    const int heads = pairs.s.n_heads + 2 * pairs.s.kv_heads;
    for (int i = threadIdx.x; i < half; i += kThreads) {
        pairs.angle(i, row, &angles[i].x, &angles[i].y);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * half; i += kThreads) {
        const T *from = qkv + row * ld + i / half * pairs.s.d + i % half;
        const float2 angle = angles[i % half];
        pairs.store(i / half, i % half, row, cuda::to_float(from[0]), cuda::to_float(from[half]),
                    angle.x, angle.y);
    }
}

// Row i = the norm of row rows[i] of x.
template <typename T>
__global__ void norm_rows_kernel(T *out, const float *x, int64_t ldx, const int32_t *rows,
                                 cuda::Reals weight, int64_t d, float epsilon) {
    __shared__ float scratch[kThreads / cuda::kWarp];
    cuda::allow_next();
    cuda::wait_for_input();
    const float *from = x + int64_t(rows[blockIdx.x]) * ldx;
    float sum = 0;
    for (int64_t i = threadIdx.x; i < d; i += kThreads) {
        sum += from[i] * from[i];
    }
    sum = cuda::block_sum<kThreads>(sum, scratch);
    const float factor = 1.0f / sqrtf(sum / float(d) + epsilon);
    for (int64_t i = threadIdx.x; i < d; i += kThreads) {
        out[blockIdx.x * d + i] = cuda::from_float<T>(from[i] * factor * weight.load(i));
    }
}

bool is_on_16_bytes(const Tensor &tensor) {
    return reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0;
}

bool is_fast(const Tensor &residual, const Norm &norm, const LinearPart &part) {
    const DType dtype = part.weight->bytes.dtype();
    return dtype != LLAISYS_DTYPE_F32 && norm.normed.dtype() == dtype &&
           residual.dtype() == LLAISYS_DTYPE_F32 && residual.size(1) % 8 == 0 &&
           residual.stride(0) % 4 == 0 && is_on_16_bytes(residual) && is_on_16_bytes(norm.normed) &&
           is_on_16_bytes(part.weight->bytes);
}

// What a product of few rows reads: the residual row itself, or normalised rows.
cuda::SkinnyInput skinny_input(const device::Stream &stream, const Tensor &residual,
                               const Norm &norm) {
    cuda::SkinnyInput in{};
    in.m = int(residual.size(0));
    in.k = int(residual.size(1));
    if (cuda::can_norm_inside(in.m, in.k) && norm.weight.dtype() == LLAISYS_DTYPE_F32 &&
        is_on_16_bytes(norm.weight)) {
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
    PairStore<T> pairs{};
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
    if (n <= cuda::kSkinnyRows) {
        const auto weights = [](const LinearPart &part) {
            return reinterpret_cast<const T *>(part.weight->bytes.data());
        };
        const QkvUse<T> use{pairs, {weights(q), weights(k), weights(v)}, residual.size(1)};
        const int units = (pairs.s.n_heads + 2 * pairs.s.kv_heads) * pairs.s.d / 16;
        cuda::run_skinny<T>(cuda_stream, skinny_input(stream, residual, norm), use, units);
        return;
    }
    const LinearPart parts[] = {
        {q.weight, nullptr, q.out}, {k.weight, nullptr, k.out}, {v.weight, nullptr, v.out}};
    rms_norm(stream, norm.normed, residual, norm.weight, norm.epsilon);
    linear(stream, norm.normed, parts, 3);
    cuda::launch(cuda_stream, finish_qkv_kernel<T>, unsigned(n), kThreads, 0, true, pairs,
                 static_cast<const T *>(pairs.q), pairs.q_row);
}

template <typename T>
void mlp_input(const device::Stream &stream, const Tensor &residual, const Norm &norm,
               const LinearPart &gate, const LinearPart &up) {
    const int64_t n = gate.weight->out_features;
    const SwigluUse<T> use{reinterpret_cast<const T *>(gate.weight->bytes.data()),
                           reinterpret_cast<const T *>(up.weight->bytes.data()),
                           n,
                           residual.size(1),
                           reinterpret_cast<T *>(gate.out->data()),
                           gate.out->stride(0)};
    cuda::run_skinny<T>(device::cuda_stream_of(stream), skinny_input(stream, residual, norm), use,
                        int((n + 7) / 8));
}

template <typename T>
void head(const device::Stream &stream, const Tensor &logits, const Tensor &residual,
          const Norm &norm, const LinearWeight &weight, const Tensor &rows) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const int64_t m = rows.size(0);
    const int64_t k = residual.size(1);
    const int64_t n = weight.out_features;
    if (cuda::can_norm_inside(m, k) && norm.weight.dtype() == LLAISYS_DTYPE_F32 &&
        is_on_16_bytes(norm.weight)) {
        cuda::SkinnyInput in{};
        in.m = 1;
        in.k = int(k);
        in.residual = residual.as<float>();
        in.ld_residual = residual.stride(0);
        in.rows = rows.as<int32_t>();
        in.norm_weight = norm.weight.as<float>();
        in.epsilon = norm.epsilon;
        constexpr int kUnit = 16;
        const cuda::StoreRows<T> use{reinterpret_cast<const T *>(weight.bytes.data()),
                                     n,
                                     k,
                                     cuda::reals(nullptr),
                                     cuda::reals(logits),
                                     logits.stride(0),
                                     false,
                                     kUnit};
        cuda::run_skinny<T>(cuda_stream, in, use, int((n + kUnit - 1) / kUnit));
        return;
    }
    cuda::launch(cuda_stream, norm_rows_kernel<T>, unsigned(m), kThreads, 0, true,
                 reinterpret_cast<T *>(norm.normed.data()), residual.as<float>(),
                 residual.stride(0), rows.as<int32_t>(), cuda::reals(norm.weight), k, norm.epsilon);
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
        (residual.size(0) > cuda::kSkinnyRows &&
         !(lies_behind(*q.out, *k.out) && lies_behind(*k.out, *v.out)))) {
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
        residual.size(0) > cuda::kSkinnyRows || residual.size(0) == 0) {
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
        logits.dtype() != LLAISYS_DTYPE_F32) {
        return false;
    }
    cuda::visit_half(weight.bytes.dtype(), [&](auto type) {
        head<decltype(type)>(stream, logits, residual, norm, weight, rows);
    });
    return true;
}

} // namespace llaisys::ops
