// Selects the kernel of a linear layer, out[m, n] (+)= in[m, k] * weight[n, k]^T + bias:
//
//   16-bit rows and weights of one dtype, k a multiple of 8
//     m up to 16         ops/cuda/gemm_small_m.cuh, or ops/cuda/gemm_tma_splitk.cuh for f32 output;
//                        bound by reading the weights
//     17 to 96           ops/cuda/gemm_tma_m96.cuh for f32 accumulation, where it is the fastest
//     more               cuBLASLt; without it, gemm_small_m.cuh for 16 rows at a time
//     batch-invariant    blocks of CublasLtGemm::kInvariantRows rows, zero-padded, always with the
//                        same algorithm; without one, gemm_small_m.cuh
//   everything else      linear_reference_kernel below: 16 x 16 outputs per block, f32; for tests
#include "ops/linear/cuda.hpp"

#include "device/cuda/cublaslt_gemm.hpp"
#include "ops/cuda/dispatch.cuh"
#include "ops/cuda/gemm_small_m.cuh"
#include "ops/cuda/gemm_tma_m96.cuh"
#include "ops/cuda/gemm_tma_splitk.cuh"
#include "ops/embedding/op.hpp"
#include "ops/linear/cuda_quantised.hpp"
#include "ops/rearrange/op.hpp"

#include <algorithm>
#include <iterator>

namespace llaisys::ops {

namespace {

using cuda::is_16_byte_aligned;

constexpr int kTile = 16;
constexpr int kThreads = 256;

// One GEMM, or several with adjacent weights and outputs.
struct Product {
    const Tensor &in;
    const Tensor *rows;
    int64_t m, n, k;
    DType dtype; // of the weights
    const std::byte *weight;
    const Tensor *bias;
    cuda::Reals out;
    int64_t ldo;
    bool adds;

    cuda::Reals out_row(int64_t row) const {
        return {static_cast<std::byte *>(out.data) + bytes_of(out.dtype, row * ldo), out.dtype};
    }
    const int32_t *row_indices() const { return rows != nullptr ? rows->as<int32_t>() : nullptr; }
};

__global__ void linear_reference_kernel(cuda::Reals in, int64_t ldx, const int32_t *rows, int64_t m,
                                        int64_t n, int64_t k, cuda::Reals weight, cuda::Reals bias,
                                        cuda::Reals out, int64_t ldo, bool adds) {
    __shared__ float xs[kTile][kTile + 1], ws[kTile][kTile + 1];
    const int tx = threadIdx.x, ty = threadIdx.y;
    const int64_t row = int64_t(blockIdx.y) * kTile + ty;
    const int64_t column = int64_t(blockIdx.x) * kTile + tx;
    const int64_t w_row = int64_t(blockIdx.x) * kTile + ty;
    const int64_t x_row = row < m && rows != nullptr ? rows[row] : row;
    float sum = 0;
    for (int64_t k0 = 0; k0 < k; k0 += kTile) {
        const bool is_inside = k0 + tx < k;
        xs[ty][tx] = is_inside && row < m ? in.load(x_row * ldx + k0 + tx) : 0.0f;
        ws[ty][tx] = is_inside && w_row < n ? weight.load(w_row * k + k0 + tx) : 0.0f;
        __syncthreads();
        for (int i = 0; i < kTile; ++i) {
            sum += xs[ty][i] * ws[tx][i];
        }
        __syncthreads();
    }
    if (row < m && column < n) {
        sum += bias.data != nullptr ? bias.load(column) : 0.0f;
        sum += adds ? out.load(row * ldo + column) : 0.0f;
        out.store(row * ldo + column, sum);
    }
}

__global__ void add_bias_kernel(cuda::Reals out, int64_t ldo, cuda::Reals bias, int64_t n) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n) {
        const int64_t at = int64_t(blockIdx.y) * ldo + i;
        out.store(at, out.load(at) + bias.load(i));
    }
}

// Rows of 16-byte units; one block per row.
__global__ void gather_rows_kernel(uint4 *out, const uint4 *in, int64_t stride, const int32_t *rows,
                                   int64_t units) {
    cuda::grid_dependency_wait();
    const uint4 *from = in + int64_t(rows[blockIdx.x]) * stride;
    for (int64_t i = threadIdx.x; i < units; i += kThreads) {
        out[blockIdx.x * units + i] = from[i];
    }
}

// Row i = row first + i of the input, in 16-byte units; zeros from row m on. One block per row.
__global__ void pad_rows_kernel(uint4 *out, const uint4 *in, int64_t stride, const int32_t *rows,
                                int64_t first, int64_t m, int64_t units) {
    const int64_t row = first + blockIdx.x;
    const int64_t at = row < m && rows != nullptr ? rows[row] : row;
    for (int64_t i = threadIdx.x; i < units; i += kThreads) {
        out[blockIdx.x * units + i] = row < m ? in[at * stride + i] : make_uint4(0, 0, 0, 0);
    }
}

// out (+)= sums + bias, rows of n.
__global__ void store_sums_kernel(cuda::Reals out, int64_t ldo, const float *sums, int64_t n,
                                  cuda::Reals bias, bool adds) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (i < n) {
        const int64_t at = int64_t(blockIdx.y) * ldo + i;
        float sum = sums[int64_t(blockIdx.y) * n + i];
        sum += bias.data != nullptr ? bias.load(i) : 0.0f;
        out.store(at, adds ? out.load(at) + sum : sum);
    }
}

void run_reference(const device::CudaStream &stream, const Product &p) {
    const dim3 grid(cuda::ceil_div(p.n, kTile), cuda::ceil_div(p.m, kTile));
    const cuda::Reals weight{const_cast<std::byte *>(p.weight), p.dtype};
    cuda::launch(stream, linear_reference_kernel, grid, dim3(kTile, kTile), 0, false,
                 cuda::reals(p.in), p.in.stride(0), p.row_indices(), p.m, p.n, p.k, weight,
                 cuda::reals(p.bias), p.out, p.ldo, p.adds);
}

// At most `most` rows of x from `first` on, and the epilogue of their GEMM.
template <typename T>
cuda::GemmInput some_rows(const Product &p, const void *x, int64_t ldx, int64_t first, int64_t most,
                          cuda::LinearEpilogue<T> *epilogue) {
    *epilogue = {reinterpret_cast<const T *>(p.weight),
                 p.n,
                 p.k,
                 cuda::reals(p.bias),
                 p.out_row(first),
                 p.ldo,
                 p.adds,
                 0};
    cuda::GemmInput in{};
    in.x = static_cast<const T *>(x) + first * ldx;
    in.ldx = ldx;
    in.m = int(std::min<int64_t>(most, p.m - first));
    in.k = int(p.k);
    return in;
}

template <typename T>
void run_small_m(const device::CudaStream &stream, const Product &p, const void *x, int64_t ldx) {
    for (int64_t first = 0; first < p.m; first += cuda::kSmallM) {
        cuda::LinearEpilogue<T> epilogue{};
        const cuda::GemmInput in = some_rows<T>(p, x, ldx, first, cuda::kSmallM, &epilogue);
        cuda::run_gemm_small_m<T>(stream, in, epilogue);
    }
}

// gemm_tma_m96.cuh for GEMMs that accumulate into f32; false where it is not supported or
// cuBLASLt is faster.
template <typename T>
bool run_m96(const device::CudaStream &stream, const Product &p, const void *x, int64_t ldx) {
    if (p.out.dtype != LLAISYS_DTYPE_F32 || !p.adds || p.m > cuda::kM96MaxM) {
        return false;
    }
    cuda::LinearEpilogue<T> epilogue{};
    const cuda::GemmInput in = some_rows<T>(p, x, ldx, 0, p.m, &epilogue);
    const cuda::M96Tuning tuning = cuda::m96_residual_tuning(in.m, p.n, p.k);
    if (!cuda::can_gemm_tma_m96<T>(stream, in, epilogue.atoms(), tuning)) {
        return false;
    }
    cuda::run_gemm_tma_m96<T>(stream, in, epilogue, tuning);
    return true;
}

// gemm_tma_splitk.cuh; false where it is not supported or gemm_small_m_bulk.cuh is faster.
template <typename T>
bool run_splitk(const device::CudaStream &stream, const Product &p, const void *x, int64_t ldx) {
    if (p.out.dtype != LLAISYS_DTYPE_F32 || p.bias != nullptr || p.m > cuda::kSplitKMaxM) {
        return false;
    }
    const cuda::SplitKProblem product{
        x,     ldx,   p.weight, int(p.m), int(p.n), int(p.k), static_cast<float *>(p.out.data),
        p.ldo, p.adds};
    if (!cuda::prefers_gemm_tma_splitk(stream, product)) {
        return false;
    }
    cuda::run_gemm_tma_splitk<T>(stream, product);
    return true;
}

bool run_large(const device::CudaStream &stream, const Product &p, const void *x, int64_t ldx) {
    if (stream.products == nullptr) {
        return false;
    }
    const device::GemmProblem product{p.m,      p.n,        p.k,   p.dtype,     x,     ldx,
                                      p.weight, p.out.data, p.ldo, p.out.dtype, p.adds};
    if (!stream.products->run(stream.stream, product, stream.has_trials)) {
        return false;
    }
    if (p.bias != nullptr) {
        const dim3 grid(cuda::ceil_div(p.n, kThreads), unsigned(p.m));
        cuda::launch(stream, add_bias_kernel, grid, kThreads, 0, false, p.out, p.ldo,
                     cuda::reals(p.bias), p.n);
    }
    return true;
}

// Batch-invariant: the bits of a row depend on that row only. False without such an algorithm for
// this shape.
bool run_exact(device::CudaStream &stream, const Product &p) {
    constexpr int64_t kRows = device::CublasLtGemm::kInvariantRows;
    if (stream.products == nullptr) {
        return false;
    }
    const int64_t x_bytes = bytes_of(p.dtype, kRows * p.k); // multiple of 256
    auto *x = static_cast<std::byte *>(
        stream.scratch.at_least(size_t(x_bytes + kRows * p.n * int64_t(sizeof(float)))));
    auto *sums = reinterpret_cast<float *>(x + x_bytes);
    const device::GemmProblem product{kRows,    p.n,  p.k, p.dtype,           x,    p.k,
                                      p.weight, sums, p.n, LLAISYS_DTYPE_F32, false};
    for (int64_t first = 0; first < p.m; first += kRows) {
        cuda::launch(stream, pad_rows_kernel, unsigned(kRows), kThreads, 0, false,
                     reinterpret_cast<uint4 *>(x), reinterpret_cast<const uint4 *>(p.in.data()),
                     p.in.stride(0) / 8, p.row_indices(), first, p.m, p.k / 8);
        if (!stream.products->run_invariant(stream.stream, product)) {
            return false;
        }
        const dim3 grid(cuda::ceil_div(p.n, kThreads), unsigned(std::min(kRows, p.m - first)));
        cuda::launch(stream, store_sums_kernel, grid, kThreads, 0, false, p.out_row(first), p.ldo,
                     sums, p.n, cuda::reals(p.bias), p.adds);
    }
    return true;
}

bool is_fast(const Product &p) {
    return p.dtype != LLAISYS_DTYPE_F32 && p.in.dtype() == p.dtype && p.k > 0 && p.k % 8 == 0 &&
           p.in.stride(0) % 8 == 0 && is_16_byte_aligned(p.in.data()) &&
           is_16_byte_aligned(p.weight) &&
           (p.out.dtype == LLAISYS_DTYPE_F32 || p.out.dtype == p.dtype);
}

void run(device::CudaStream &stream, const Product &p) {
    if (p.m == 0 || p.n == 0) {
        return;
    }
    if (!is_fast(p)) {
        return run_reference(stream, p);
    }
    if (stream.is_exact && run_exact(stream, p)) {
        return;
    }
    const void *x = p.in.data();
    int64_t ldx = p.in.stride(0);
    if (p.rows != nullptr) {
        void *gathered = stream.scratch.at_least(size_t(bytes_of(p.dtype, p.m * p.k)));
        cuda::launch(stream, gather_rows_kernel, unsigned(p.m), kThreads, 0, true,
                     static_cast<uint4 *>(gathered), static_cast<const uint4 *>(x), ldx / 8,
                     p.rows->as<int32_t>(), p.k / 8);
        x = gathered;
        ldx = p.k;
    }
    const bool are_many = p.m > cuda::kSmallM && !stream.is_exact;
    cuda::dispatch_half(p.dtype, [&](auto type) {
        using T = decltype(type);
        if (!(are_many && (run_m96<T>(stream, p, x, ldx) || run_large(stream, p, x, ldx))) &&
            !run_splitk<T>(stream, p, x, ldx)) {
            run_small_m<T>(stream, p, x, ldx);
        }
    });
}

// Whether part b follows part a in weight memory and in the output columns.
bool continues(const LinearPart &a, const LinearPart &b) {
    const Tensor &wa = a.weight->bytes;
    const Tensor &wb = b.weight->bytes;
    return a.bias == nullptr && b.bias == nullptr && wa.dtype() == wb.dtype() &&
           a.out->dtype() == b.out->dtype() && a.out->stride(0) == b.out->stride(0) &&
           wb.data() == wa.data() + wa.bytes() &&
           b.out->data() == a.out->data() + bytes_of(a.out->dtype(), a.out->size(1));
}

void pack(const device::Stream &stream, const Tensor &weight, LinearWeight *packed) {
    if (weight.device() == LLAISYS_DEVICE_CPU) {
        packed->bytes.load(weight.data(), size_t(weight.bytes()));
    } else {
        rearrange(stream, packed->bytes, weight);
        stream.synchronize(); // the caller may free the weight
    }
}

void run_parts(const device::Stream &stream, const Tensor &in, const LinearPart *parts, int n_parts,
               const Tensor *rows) {
    const int64_t m = rows != nullptr ? rows->size(0) : in.size(0);
    for (int first = 0, end = 0; first < n_parts; first = end) {
        int64_t n = parts[first].weight->out_features;
        for (end = first + 1; end < n_parts && continues(parts[end - 1], parts[end]); ++end) {
            n += parts[end].weight->out_features;
        }
        const LinearPart &part = parts[first];
        run(device::cuda_stream_of(stream),
            Product{in, rows, m, n, in.size(1), part.weight->bytes.dtype(),
                    part.weight->bytes.data(), part.bias, cuda::reals(*part.out),
                    part.out->stride(0), false});
    }
}

void rows_of(const device::Stream &stream, const Tensor &out, const Tensor &index,
             const LinearWeight &weight) {
    embedding(stream, out, index, weight.bytes);
}

void add(const device::Stream &stream, const Tensor &out, const Tensor &in,
         const LinearWeight &weight, const Tensor *bias) {
    run(device::cuda_stream_of(stream),
        Product{in, nullptr, in.size(0), weight.out_features, in.size(1), weight.bytes.dtype(),
                weight.bytes.data(), bias, cuda::reals(out), out.stride(0), true});
}

LinearRowLayout plain_rows(const Tensor &weight) { return {weight.dtype(), weight.size(1), false}; }

constexpr LinearFormat plain(DType dtype) {
    return {dtype, plain_rows, pack, run_parts, nullptr, rows_of, add};
}

constexpr LinearFormat quantised(DType dtype) {
    return {dtype,   quantised_rows_cuda,    pack_quantised_cuda,      run_quantised_cuda,
            nullptr, rows_of_quantised_cuda, linear_add_quantised_cuda};
}

constexpr LinearFormat kFormats[] = {
    plain(LLAISYS_DTYPE_F32),         plain(LLAISYS_DTYPE_F16),
    plain(LLAISYS_DTYPE_BF16),        quantised(LLAISYS_DTYPE_Q8_0),
    quantised(LLAISYS_DTYPE_Q4_0),    quantised(LLAISYS_DTYPE_Q4_1),
    quantised(LLAISYS_DTYPE_Q5_0),    quantised(LLAISYS_DTYPE_Q5_1),
    quantised(LLAISYS_DTYPE_Q4_K),    quantised(LLAISYS_DTYPE_Q5_K),
    quantised(LLAISYS_DTYPE_Q6_K),    quantised(LLAISYS_DTYPE_Q2_K),
    quantised(LLAISYS_DTYPE_Q3_K),    quantised(LLAISYS_DTYPE_IQ4_NL),
    quantised(LLAISYS_DTYPE_I4_G32),  quantised(LLAISYS_DTYPE_I4_G128),
    quantised(LLAISYS_DTYPE_I8_G32),  quantised(LLAISYS_DTYPE_I8_G128),
    quantised(LLAISYS_DTYPE_F8_G128),
};

} // namespace

LinearFormats linear_formats_cuda() { return {kFormats, int(std::size(kFormats))}; }

const LinearFormat &linear_format_cuda(DType dtype) {
    const auto found = std::find_if(std::begin(kFormats), std::end(kFormats),
                                    [&](const LinearFormat &f) { return f.dtype == dtype; });
    ensure(found != std::end(kFormats), "no linear format for ", name_of(dtype));
    return *found;
}

} // namespace llaisys::ops
