// Selects the LoRA kernels:
//
//   16-bit rows and adapters of one dtype, sizes a multiple of 8
//     up to 512 rows     cuda_cluster.cuh: one launch, bound by latency
//     more, gate and up,
//     batch-invariant    cuda_two_kernels.cuh: A and B are read once per tile of rows, mostly from
//                        L2; SwiGLU is part of the second kernel
//   everything else      reference kernels below, f32; for tests
#include "ops/lora/cuda.hpp"

#include "ops/cuda/dispatch_dtype.cuh"
#include "ops/lora/cuda_cluster.cuh"
#include "ops/lora/cuda_two_kernels.cuh"

#include <algorithm>

namespace llaisys::ops {

namespace {

using namespace cuda;

constexpr int kThreads = kLoraThreads;
constexpr int64_t kClusterRows = 512;
constexpr int kBlocksPerSm = 2; // of expand

// Block: one tile and one part; a warp per rank.
__global__ void lora_shrink_reference_kernel(const __grid_constant__ LoraArgs args) {
    grid_dependency_wait();
    if (int(blockIdx.x) >= args.n_adapter_tiles()) {
        return;
    }
    const LoraTile tile = args.tiles[1 + blockIdx.x];
    const LoraKernelPart &part = args.parts[blockIdx.y];
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int rank = tile.rank;
    for (int i = warp; i < tile.count * rank; i += kLoraWarps) {
        const int row = i / rank, r = i % rank;
        const int64_t x = args.rows[tile.first + row] * args.ldx;
        const int64_t a = (int64_t(tile.slot) * args.max_rank + r) * args.k;
        float sum = 0;
        for (int k = lane; k < args.k; k += kWarpSize) {
            sum += args.x.load(x + k) * part.a.load(a + k);
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            args.sums(0, tile.first + row, blockIdx.y)[r] = sum;
        }
    }
}

// Block: one tile, kThreads outputs of one part.
__global__ void lora_expand_reference_kernel(const __grid_constant__ LoraArgs args) {
    grid_dependency_wait();
    const LoraKernelPart &part = args.parts[blockIdx.z];
    const int output = blockIdx.y * kThreads + threadIdx.x;
    if (int(blockIdx.x) >= args.n_adapter_tiles() || output >= part.n) {
        return;
    }
    const LoraTile tile = args.tiles[1 + blockIdx.x];
    const int rank = tile.rank;
    const float scale = part.scale(tile.slot);
    const int64_t b = (int64_t(tile.slot) * part.n + output) * args.max_rank;
    for (int row = 0; scale != 0.0f && row < tile.count; ++row) {
        const float *t = args.sums(0, tile.first + row, blockIdx.z);
        float sum = 0;
        for (int r = 0; r < rank; ++r) {
            sum += scale * t[r] * part.b.load(b + r);
        }
        const int64_t to = args.rows[tile.first + row] * part.ldo + output;
        part.out.store(to, part.out.load(to) + sum);
    }
}

bool is_16_byte_aligned(const Tensor &tensor) {
    return reinterpret_cast<uintptr_t>(tensor.data()) % 16 == 0 && tensor.stride(0) % 8 == 0;
}

// Whether the tensor core kernels support the product.
bool is_fast(const Tensor &in, const LoraPart *parts, int n_parts) {
    const DType dtype = parts[0].weight->a.dtype();
    bool is_fast = dtype != LLAISYS_DTYPE_F32 && in.dtype() == dtype && in.size(1) % 8 == 0 &&
                   is_16_byte_aligned(in);
    for (int p = 0; p < n_parts; ++p) {
        const Tensor &out = *parts[p].out;
        is_fast = is_fast && (out.dtype() == dtype || out.dtype() == LLAISYS_DTYPE_F32) &&
                  out.size(1) % 8 == 0 && is_16_byte_aligned(out);
    }
    return is_fast;
}

LoraArgs args_of(const Tensor &in, const LoraPart *parts, int n_parts, const LoraRows &rows,
                 const Tensor &scratch) {
    LoraArgs args{};
    args.n_parts = n_parts;
    args.max_rank = int(parts[0].weight->max_rank());
    args.k = int(in.size(1));
    args.m = in.size(0);
    args.splits = int(ceil_div(args.k, kLoraSplit));
    args.column_blocks = int(ceil_div(int64_t(n_parts) * args.max_rank, 8 * kLoraColumnTiles));
    args.x = reals(in);
    args.ldx = in.stride(0);
    args.rows = rows.rows.as<int32_t>();
    args.tiles = reinterpret_cast<const LoraTile *>(rows.tiles.as<int32_t>());
    args.t = scratch.as<float>();
    for (int p = 0; p < n_parts; ++p) {
        const LoraWeight &weight = *parts[p].weight;
        const Tensor &out = *parts[p].out;
        args.parts[p].a = reals(weight.a);
        args.parts[p].b = reals(weight.b);
        args.parts[p].slots = weight.slots.as<int32_t>();
        args.parts[p].out = reals(out);
        args.parts[p].ldo = out.stride(0);
        args.parts[p].n = int(out.size(1));
    }
    return args;
}

// Blocks for at most `items` work items.
unsigned blocks_for(const device::CudaStream &stream, int64_t items, int per_sm) {
    return unsigned(std::max<int64_t>(1, std::min<int64_t>(items, stream.n_sms * per_sm)));
}

template <typename T>
void run_shrink(const device::CudaStream &stream, const LoraArgs &args, int64_t n_tiles) {
    launch(stream, lora_shrink_kernel<T>,
           blocks_for(stream, n_tiles * args.splits * args.column_blocks, 1), kThreads, 0, true,
           args);
}

template <typename T>
void run_two_kernels(const device::CudaStream &stream, const LoraArgs &args, int64_t n_tiles) {
    int chunks = 0;
    for (int p = 0; p < args.n_parts; ++p) {
        chunks += int(ceil_div(args.parts[p].n, 8 * kLoraExpandTiles));
    }
    run_shrink<T>(stream, args, n_tiles);
    launch(stream, lora_expand_kernel<T>,
           blocks_for(stream, (n_tiles * chunks + kLoraWarps - 1) / kLoraWarps, kBlocksPerSm),
           kThreads, 0, true, args, chunks);
}

template <typename T, int ColumnTiles, int Blocks>
void launch_cluster(const device::CudaStream &stream, const LoraArgs &args, int64_t n_tiles) {
    const auto kernel = lora_cluster_kernel<T, ColumnTiles, Blocks>;
    set_max_dynamic_smem(kernel, lora_cluster_bytes<ColumnTiles>(kLoraClusterRanks));
    launch(stream, kernel, unsigned(n_tiles) * kLoraCluster, kThreads,
           lora_cluster_bytes<ColumnTiles>(args.n_parts * args.max_rank),
           {true, unsigned(kLoraCluster)}, args);
}

template <typename T>
void run_cluster(const device::CudaStream &stream, const LoraArgs &args, int64_t n_tiles) {
    args.n_parts == 1 ? launch_cluster<T, 2, 4>(stream, args, n_tiles)
                      : launch_cluster<T, 6, 1>(stream, args, n_tiles);
}

void run_reference(const device::CudaStream &stream, const LoraArgs &args, unsigned n_tiles) {
    int most_outputs = 0;
    for (int p = 0; p < args.n_parts; ++p) {
        most_outputs = std::max(most_outputs, args.parts[p].n);
    }
    const auto n_parts = unsigned(args.n_parts);
    launch(stream, lora_shrink_reference_kernel, dim3(n_tiles, n_parts), kThreads, 0, true, args);
    launch(stream, lora_expand_reference_kernel,
           dim3(n_tiles, ceil_div(most_outputs, kThreads), n_parts), kThreads, 0, true, args);
}

} // namespace

void lora_cuda(const device::Stream &stream, const Tensor &in, const LoraPart *parts, int n_parts,
               const LoraRows &rows, const Tensor &scratch) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const LoraArgs args = args_of(in, parts, n_parts, rows, scratch);
    const int64_t n_tiles = rows.tiles.size(0) - 1;
    if (!is_fast(in, parts, n_parts)) {
        return run_reference(cuda_stream, args, unsigned(n_tiles));
    }
    const bool has_cluster = cuda_stream.has_pdl && !cuda_stream.is_exact &&
                             args.m <= kClusterRows && n_parts * args.max_rank <= kLoraClusterRanks;
    dispatch_half(in.dtype(), [&](auto type) {
        using T = decltype(type);
        has_cluster ? run_cluster<T>(cuda_stream, args, n_tiles)
                    : run_two_kernels<T>(cuda_stream, args, n_tiles);
    });
}

bool lora_swiglu_cuda(const device::Stream &stream, const Tensor &in, const LoraPart *parts,
                      const LoraRows &rows, const Tensor &scratch) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    const Tensor &gate = *parts[0].out, &up = *parts[1].out;
    if (!is_fast(in, parts, 2) || gate.dtype() != in.dtype() || up.dtype() != in.dtype()) {
        return false;
    }
    if (in.size(0) == 0) {
        return true;
    }
    const LoraArgs args = args_of(in, parts, 2, rows, scratch);
    const int64_t n_tiles = rows.tiles.size(0) - 1;
    const int chunks = int(ceil_div(gate.size(1), 8 * kLoraExpandTiles));
    dispatch_half(in.dtype(), [&](auto type) {
        using T = decltype(type);
        run_shrink<T>(cuda_stream, args, n_tiles);
        launch(
            cuda_stream, lora_expand_swiglu_kernel<T>,
            blocks_for(cuda_stream, (n_tiles * chunks + kLoraWarps - 1) / kLoraWarps, kBlocksPerSm),
            kThreads, 0, true, args, chunks);
    });
    return true;
}

} // namespace llaisys::ops
