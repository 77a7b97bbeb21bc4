#include "ops/linear/cuda_quantised.hpp"

#include "device/cuda/cublaslt_gemm.hpp"
#include "ops/cuda/dispatch.cuh"
#include "ops/cuda/quant_gemm.cuh"
#include "ops/cuda/quant_weight.cuh"
#include "ops/linear/cuda.hpp"
#include "ops/linear/cuda_dequantise.cuh"
#include "ops/linear/quant_block.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

namespace llaisys::ops {

namespace {

using cuda::is_16_byte_aligned;

constexpr int64_t kMaxPanelBytes = int64_t(512) << 20; // of a converted weight

// -- Packing --------------------------------------------------------------------------------------

__device__ float half_value(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

// Scale and minimum of group g of a block: value s * q + m, or s * (q - zero) without a minimum.
struct GroupParams {
    float s, m;
};
__device__ GroupParams group_params(DType dtype, const QuantBlock &block, int g) {
    switch (dtype) {
    case LLAISYS_DTYPE_Q4_0:
    case LLAISYS_DTYPE_Q8_0:
    case LLAISYS_DTYPE_Q5_0:
    case LLAISYS_DTYPE_IQ4_NL:
        return {half_value(block.d), 0};
    case LLAISYS_DTYPE_Q3_K:
    case LLAISYS_DTYPE_Q6_K:
        return {half_value(block.d) * float(int8_t(block.scales[g])), 0};
    case LLAISYS_DTYPE_Q4_1:
    case LLAISYS_DTYPE_Q5_1:
        return {half_value(block.d), -half_value(block.min)};
    case LLAISYS_DTYPE_Q4_K:
    case LLAISYS_DTYPE_Q5_K:
    case LLAISYS_DTYPE_Q2_K:
        return {half_value(block.d) * float(block.scales[g]),
                -half_value(block.min) * float(block.mins[g])};
    case LLAISYS_DTYPE_F8_G128:
        return {block.s, 0};
    default: // grouped: s * (q - z)
        return {block.s, -block.s * half_value(block.min)};
    }
}

// Value of a code in the packed layout: s * (code - zero) + m, where code = q + added.
struct CodeShift {
    int added, zero;
};
__device__ CodeShift code_shift(DType dtype) {
    switch (dtype) {
    case LLAISYS_DTYPE_Q4_0: // s * (q - 8)
        return {0, 8};
    case LLAISYS_DTYPE_Q3_K: // s * (q - 4)
        return {0, 4};
    case LLAISYS_DTYPE_Q5_0: // s * (q - 16)
    case LLAISYS_DTYPE_Q5_1:
    case LLAISYS_DTYPE_Q5_K:
        return {-16, dtype == LLAISYS_DTYPE_Q5_0 ? 0 : -16};
    case LLAISYS_DTYPE_Q6_K: // s * (q - 32)
        return {-32, 0};
    default:
        return {0, 0};
    }
}

// One thread per block of the file. The zero point moves into m.
__global__ void pack_blocks_kernel(DType dtype, int elements, int block_bytes, const std::byte *in,
                                   unsigned char *out, float *row_scales, int64_t row_bytes,
                                   QuantRowLayout layout, int64_t blocks_per_row,
                                   int64_t n_blocks) {
    const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= n_blocks) {
        return;
    }
    QuantBlock block;
    try_read_block(dtype, in + at * block_bytes, &block);
    const int64_t row = at / blocks_per_row;
    const int64_t first = at % blocks_per_row * elements; // along k
    const int64_t k = blocks_per_row * elements;
    const int64_t segment = quant_segment(layout.codes);
    const int64_t begin = first / segment * segment;
    const int64_t values = min(segment, k - begin); // of this segment
    unsigned char *to = out + row * row_bytes + begin / segment * layout.segment_bytes(segment);
    unsigned char *codes = to + layout.code_bytes(first - begin);
    auto *params = reinterpret_cast<bf16_t *>(to + layout.code_bytes(values));
    const CodeShift shift = code_shift(dtype);
    for (int g = 0; g < elements / layout.group && layout.param_bytes > 0; ++g) {
        const GroupParams group = group_params(dtype, block, g);
        const int64_t slot = (first - begin) / layout.group + g;
        const auto s = __float2bfloat16_rn(group.s);
        const auto m = __float2bfloat16_rn(group.m - float(shift.zero) * group.s);
        if (layout.param_bytes == 4) {
            params[2 * slot].bits = __bfloat16_as_ushort(s);
            params[2 * slot + 1].bits = __bfloat16_as_ushort(m);
        } else {
            params[slot].bits = __bfloat16_as_ushort(s);
        }
    }
    if (row_scales != nullptr && first == 0) {
        row_scales[row] = block.s;
    }
    if (layout.codes != QuantCodes::int4) {
        for (int i = 0; i < elements; ++i) {
            codes[i] = uint8_t(block.q[i] + shift.added);
        }
        return;
    }
    auto *words = reinterpret_cast<uint32_t *>(codes);
    for (int i = 0; i < elements; i += 8) {
        uint32_t word = 0;
        for (int j = 0; j < 4; ++j) {
            word |= uint32_t(block.q[i + 2 * j] & 15) << (4 * j);
            word |= uint32_t(block.q[i + 2 * j + 1] & 15) << (4 * j + 16);
        }
        words[i / 8] = word;
    }
}

constexpr int kF8BlockBytes = 4 + 128; // scale, codes

// Whether every row of f8_g128 blocks has one scale. Weights on a device are read back; loaders keep
// them on the host.
bool has_one_scale_per_row(Tensor weight) {
    if (weight.device() != LLAISYS_DEVICE_CPU) {
        const Tensor copy = Tensor::create(weight.shape(), weight.dtype());
        weight.store(copy.data(), size_t(copy.bytes()));
        weight = copy;
    }
    const int64_t blocks = weight.size(1) / 128;
    for (int64_t row = 0; row < weight.size(0); ++row) {
        const std::byte *first = weight.data() + row * blocks * kF8BlockBytes;
        for (int64_t b = 1; b < blocks; ++b) {
            if (std::memcmp(first, first + b * kF8BlockBytes, sizeof(float)) != 0) {
                return false;
            }
        }
    }
    return true;
}

// Memory of the stream for converted weights.
std::shared_ptr<Storage> panel_memory(const device::Stream &stream, int64_t bytes) {
    std::vector<std::shared_ptr<void>> &panels = device::cuda_stream_of(stream).panels;
    auto last = panels.empty() ? nullptr : std::static_pointer_cast<Storage>(panels.back());
    if (last == nullptr || last->bytes() < bytes) {
        last = std::make_shared<Storage>(stream.type(), stream.device_id(), bytes);
        panels.push_back(last); // a captured graph may hold the earlier ones
    }
    return last;
}

// -- Products -------------------------------------------------------------------------------------

bool is_fast(const Tensor &in, const Tensor &out) {
    const bool is_half = in.dtype() == LLAISYS_DTYPE_BF16 || in.dtype() == LLAISYS_DTYPE_F16;
    return is_half && in.stride(0) % 8 == 0 && is_16_byte_aligned(in) &&
           (out.dtype() == LLAISYS_DTYPE_F32 || out.dtype() == in.dtype());
}

// Rows of x that one product reads: gemm_tma_quant.cuh or gemm_small_m_quant.cuh.
int64_t pass_rows(const device::Stream &stream, const LinearWeight &weight, int64_t m, int64_t n,
                  DType dtype) {
    const cuda::QuantMatrix matrix = quant_matrix_of(weight);
    const int64_t most = cuda::quant_tma_rows(matrix.layout.codes);
    cuda::LinearEpilogue<cuda::bf16> epilogue{};
    epilogue.n = n;
    const bool has_tma =
        dtype == LLAISYS_DTYPE_BF16 &&
        cuda::uses_gemm_tma_quant<cuda::bf16>(device::cuda_stream_of(stream), matrix,
                                              std::min(m, most), weight.in_features, epilogue);
    return has_tma ? most : cuda::kQuantMaxM;
}

// Whether products of m rows read the weights as they are, in passes.
bool uses_passes(const device::Stream &stream, const LinearWeight &weight, int64_t m, DType dtype) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const int64_t rows = pass_rows(stream, weight, m, weight.out_features, dtype);
    return (m <= std::max(rows, kQuantPassRows) || cuda_stream.is_exact) &&
           cuda::can_gemm_small_m_quant(cuda_stream, 1, weight.in_features);
}

// Whether products of m rows may use e4m3 rows of x.
bool uses_f8_rows(const device::Stream &stream, const LinearWeight &weight, int64_t m) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    return m > cuda::kM96MaxM && weight.scales.defined() && !cuda_stream.is_exact &&
           cuda_stream.products != nullptr && cuda_stream.device_major >= 9 &&
           weight.out_features % 16 == 0;
}

cuda::GemmInput rows_of_x(const Tensor &in) {
    cuda::GemmInput input{};
    input.x = in.data();
    input.ldx = in.stride(0);
    input.m = int(in.size(0));
    input.k = int(in.size(1));
    return input;
}

// out (+)= in * weights^T + bias for n adjacent rows of weights, some rows of x at a time.
void run_passes(const device::Stream &stream, const Tensor &in, const LinearWeight &weight,
                int64_t n, const Tensor *bias, const Tensor &out, bool adds) {
    const int64_t rows = pass_rows(stream, weight, in.size(0), n, in.dtype());
    cuda::dispatch_half(in.dtype(), [&](auto type) {
        using T = decltype(type);
        for (int64_t first = 0; first < in.size(0); first += rows) {
            const int64_t last = std::min(first + rows, in.size(0));
            const Tensor to = out.slice(0, first, last);
            const cuda::GemmInput input = rows_of_x(in.slice(0, first, last));
            const cuda::LinearEpilogue<T> epilogue{
                nullptr, n, in.size(1), cuda::reals(bias), cuda::reals(to), to.stride(0), adds, 0};
            cuda::quant_gemm<T>(device::cuda_stream_of(stream), input, quant_matrix_of(weight),
                                epilogue);
        }
    });
}

// out (+)= x * weights^T for n adjacent rows of weights, with e4m3 rows of x; false without an
// algorithm. dtype: of input.x.
bool run_f8_rows(const device::Stream &stream, const cuda::GemmInput &input, DType dtype,
                 const LinearWeight &weight, int64_t n, const Tensor &out, bool adds) {
    device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    cuda::QuantRows x{};
    cuda::dispatch_half(dtype, [&](auto type) {
        x = cuda::quantise_rows<decltype(type)>(cuda_stream, input,
                                                quant_row_layout(LLAISYS_DTYPE_F8_G128, true), 1);
    });
    const device::GemmProblem product{x.m,
                                      n,
                                      x.k,
                                      LLAISYS_DTYPE_F8_G128,
                                      x.values,
                                      x.k,
                                      weight.bytes.data(),
                                      out.data(),
                                      out.stride(0),
                                      out.dtype(),
                                      adds,
                                      x.scales,
                                      weight.scales.as<float>()};
    return cuda_stream.products->run(cuda_stream.stream, product, cuda_stream.has_trials);
}

// out (+)= in * weights^T + bias for n adjacent rows of weights from `weight` on, without
// converting them; false where that is not supported.
bool run_quantised(const device::Stream &stream, const Tensor &in, const LinearWeight &weight,
                   int64_t n, const Tensor *bias, const Tensor &out, bool adds) {
    if (!is_fast(in, out)) {
        return false;
    }
    if (uses_f8_rows(stream, weight, in.size(0)) && bias == nullptr &&
        run_f8_rows(stream, rows_of_x(in), in.dtype(), weight, n, out, adds)) {
        return true;
    }
    if (!uses_passes(stream, weight, in.size(0), in.dtype())) {
        return false;
    }
    run_passes(stream, in, weight, n, bias, out, adds);
    return true;
}

// Calls run(panel) with some outputs of a part at a time, their weights in `dtype`.
template <typename Run>
void for_panels(const device::Stream &stream, const LinearPart &part, DType dtype, const Run &run) {
    const LinearWeight &weight = *part.weight;
    const int64_t row_bytes = bytes_of(dtype, weight.in_features);
    const int64_t most = std::max<int64_t>(16, kMaxPanelBytes / row_bytes / 16 * 16);
    for (int64_t first = 0; first < weight.out_features; first += most) {
        const int64_t last = std::min(first + most, weight.out_features);
        LinearWeight some = weight;
        some.out_features = last - first;
        some.bytes = weight.bytes.slice(0, first, last);
        some.scales = weight.scales.defined() ? weight.scales.slice(0, first, last) : Tensor();
        const LinearWeight *weights[] = {&some};
        LinearWeight widened;
        widen_quantised(stream, weights, 1, dtype, &widened);
        const WithoutPdl without_pdl(stream);
        const Tensor out = part.out->slice(1, first, last);
        const Tensor bias = part.bias != nullptr ? part.bias->slice(0, first, last) : Tensor();
        run(LinearPart{&widened, part.bias != nullptr ? &bias : nullptr, &out});
    }
}

} // namespace

bool is_next_quantised(const LinearWeight &a, const LinearWeight &b) {
    const bool has_scales = a.scales.defined();
    return a.dtype() == b.dtype() && a.in_features == b.in_features &&
           has_scales == b.scales.defined() && b.bytes.data() == a.bytes.data() + a.bytes.bytes() &&
           (!has_scales || b.scales.data() == a.scales.data() + a.scales.bytes());
}

bool reads_quantised(const device::Stream &stream, const LinearWeight &weight, int64_t m,
                     DType dtype) {
    return uses_passes(stream, weight, m, dtype) || uses_f8_rows(stream, weight, m);
}

bool multiply_f8_rows(const device::Stream &stream, const cuda::GemmInput &input, DType dtype,
                      const LinearWeight &weight, int64_t n, const Tensor &out) {
    return uses_f8_rows(stream, weight, input.m) &&
           run_f8_rows(stream, input, dtype, weight, n, out, false);
}

LinearRowLayout quantised_rows_cuda(const Tensor &weight) {
    const DType dtype = weight.dtype();
    const int64_t k = weight.size(1);
    const int64_t block = traits_of(dtype).block_elements;
    require(k % block == 0, "a weight in ", name_of(dtype), " must have a multiple of ", block,
            " columns, got ", k);
    const bool has_scales = dtype == LLAISYS_DTYPE_F8_G128 && has_one_scale_per_row(weight);
    return {LLAISYS_DTYPE_U8, quant_row_layout(dtype, has_scales).row_bytes(k), has_scales};
}

void pack_quantised_cuda(const device::Stream &stream, const Tensor &weight, LinearWeight *packed) {
    const LlaisysDataTypeTraits traits = traits_of(weight.dtype());
    const int64_t blocks_per_row = weight.size(1) / traits.block_elements;
    const int64_t n_blocks = weight.size(0) * blocks_per_row;
    Tensor blocks = weight;
    if (weight.device() == LLAISYS_DEVICE_CPU) {
        blocks = Tensor::create(weight.shape(), weight.dtype(), stream.type(), stream.device_id(),
                                device::Lifetime::temporary);
        blocks.load(weight.data(), size_t(weight.bytes()));
    }
    if (n_blocks > 0) {
        constexpr int kPackThreads = 128;
        const bool has_scales = packed->scales.defined();
        cuda::launch(device::cuda_stream_of(stream), pack_blocks_kernel,
                     cuda::ceil_div(n_blocks, kPackThreads), kPackThreads, 0, false, weight.dtype(),
                     int(traits.block_elements), int(traits.block_bytes),
                     static_cast<const std::byte *>(blocks.data()),
                     reinterpret_cast<unsigned char *>(packed->bytes.data()),
                     has_scales ? packed->scales.as<float>() : nullptr, packed->bytes.size(1),
                     quant_row_layout(weight.dtype(), has_scales), blocks_per_row, n_blocks);
    }
    stream.synchronize(); // the caller may free the weight
    // Before a step is captured: memory for the conversion of a fused buffer.
    const int64_t row_bytes = std::max<int64_t>(packed->bytes.size(1), 1);
    const int64_t rows = packed->bytes.storage()->bytes() / row_bytes;
    panel_memory(stream, std::min(kMaxPanelBytes, rows * weight.size(1) * 2));
}

void rows_of_quantised_cuda(const device::Stream &stream, const Tensor &out, const Tensor &index,
                            const LinearWeight &weight) {
    cuda::dequantise(device::cuda_stream_of(stream), out, quant_matrix_of(weight),
                     index.as<int64_t>(), weight.out_features);
}

bool widen_quantised(const device::Stream &stream, const LinearWeight *const *weights, int count,
                     DType dtype, LinearWeight *widened) {
    int64_t rows = 0;
    for (int i = 0; i < count; ++i) {
        rows += weights[i]->out_features;
        if (!is_quantised(weights[i]->dtype())) {
            return false;
        }
    }
    const int64_t k = weights[0]->in_features;
    if (bytes_of(dtype, rows * k) > 2 * kMaxPanelBytes) {
        return false; // the caller multiplies one weight after another, in parts
    }
    const Tensor all =
        Tensor::on(panel_memory(stream, bytes_of(dtype, rows * k)), 0, {rows, k}, dtype);
    int64_t first = 0;
    for (int i = 0; i < count; ++i) {
        const LinearWeight &weight = *weights[i];
        widened[i] = {&linear_format_cuda(dtype), weight.out_features, k,
                      all.slice(0, first, first + weight.out_features), Tensor()};
        cuda::dequantise(device::cuda_stream_of(stream), widened[i].bytes, quant_matrix_of(weight),
                         nullptr, weight.out_features);
        first += weight.out_features;
    }
    return true;
}

void run_quantised_cuda(const device::Stream &stream, const Tensor &in, const LinearPart *parts,
                        int n_parts, const Tensor *rows) {
    if (rows != nullptr ? rows->size(0) == 0 : in.size(0) == 0) {
        return;
    }
    for (int first = 0, end = 0; first < n_parts; first = end) {
        const LinearPart &part = parts[first];
        end = first + 1;
        if (part.weight->out_features == 0) {
            continue;
        }
        int64_t n = part.weight->out_features;
        const auto continues = [&](const LinearPart &a, const LinearPart &b) {
            return a.bias == nullptr && b.bias == nullptr &&
                   is_next_quantised(*a.weight, *b.weight) && a.out->dtype() == b.out->dtype() &&
                   a.out->stride(0) == b.out->stride(0) &&
                   b.out->data() == a.out->data() + bytes_of(a.out->dtype(), a.out->size(1));
        };
        while (end < n_parts && continues(parts[end - 1], parts[end])) {
            n += parts[end++].weight->out_features;
        }
        if (rows != nullptr ||
            !run_quantised(stream, in, *part.weight, n, part.bias, *part.out, false)) {
            for (int i = first; i < end; ++i) {
                for_panels(stream, parts[i], in.dtype(),
                           [&](const LinearPart &panel) { linear(stream, in, &panel, 1, rows); });
            }
        }
    }
}

void linear_add_quantised_cuda(const device::Stream &stream, const Tensor &out, const Tensor &in,
                               const LinearWeight &weight, const Tensor *bias) {
    if (in.size(0) == 0 || weight.out_features == 0) {
        return;
    }
    if (run_quantised(stream, in, weight, weight.out_features, bias, out, true)) {
        return;
    }
    for_panels(stream, {&weight, bias, &out}, in.dtype(), [&](const LinearPart &panel) {
        linear_add(stream, *panel.out, in, *panel.weight, panel.bias);
    });
}

} // namespace llaisys::ops
