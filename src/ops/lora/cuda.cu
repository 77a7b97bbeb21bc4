// Selects the LoRA kernels:
//
//   16-bit rows and adapters of one dtype, sizes a multiple of 8
//     in a decoder layer   cuda_norm.cuh, cuda_swiglu.cuh, with the parts of cuda_two_kernels.cuh
//     other products,
//     ranks above 64,
//     batch-invariant      cuda_two_kernels.cuh: A and B are read once per tile of rows
//   everything else        reference kernels below, f32; for tests
#include "ops/lora/op.hpp"

#include "ops/cuda/dispatch.cuh"
#include "ops/lora/cuda_norm.cuh"
#include "ops/lora/cuda_swiglu.cuh"
#include "ops/lora/cuda_two_kernels.cuh"

#include <algorithm>

namespace llaisys::ops {

namespace {

using namespace cuda;

constexpr int kThreads = kLoraThreads;
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

// Whether the tensor core kernels support the input and the outputs of a product.
bool is_fast_input(const Tensor &in, const LoraWeight &weight) {
    const DType dtype = weight.a.dtype();
    return dtype != LLAISYS_DTYPE_F32 && in.dtype() == dtype && in.size(1) % 8 == 0 &&
           has_aligned_rows(in);
}
bool are_fast_outputs(const LoraPart *parts, int n_parts) {
    const DType dtype = parts[0].weight->a.dtype();
    return dtype != LLAISYS_DTYPE_F32 &&
           std::all_of(parts, parts + n_parts, [&](const LoraPart &part) {
               const Tensor &out = *part.out;
               return (out.dtype() == dtype || out.dtype() == LLAISYS_DTYPE_F32) &&
                      out.size(1) % 8 == 0 && has_aligned_rows(out);
           });
}

void set_input(LoraArgs *args, const Tensor &in) {
    args->x = reals(in);
    args->ldx = in.stride(0);
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
void run_expand(const device::CudaStream &stream, const LoraArgs &args, int64_t n_tiles) {
    int chunks = 0;
    for (int p = 0; p < args.n_parts; ++p) {
        chunks += int(ceil_div(args.parts[p].n, 8 * kLoraExpandTiles));
    }
    launch(stream, lora_expand_kernel<T>,
           blocks_for(stream, (n_tiles * chunks + kLoraWarps - 1) / kLoraWarps, kBlocksPerSm),
           kThreads, 0, true, args, chunks);
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
    LoraArgs args = lora_args(rows, scratch, ceil_div(in.size(1), kLoraSplit));
    set_input(&args, in);
    for (int p = 0; p < n_parts; ++p) {
        add_lora_part(&args, *parts[p].weight, parts[p].out);
    }
    if (!is_fast_input(in, *parts[0].weight) || !are_fast_outputs(parts, n_parts)) {
        return run_reference(cuda_stream, args, unsigned(lora_tiles_of(rows)));
    }
    dispatch_half(in.dtype(), [&](auto type) {
        run_shrink<decltype(type)>(cuda_stream, args, lora_tiles_of(rows));
        run_expand<decltype(type)>(cuda_stream, args, lora_tiles_of(rows));
    });
}

void lora_expand_cuda(const device::Stream &stream, const LoraPart *parts, int n_parts,
                      const LoraRows &rows, const Tensor &terms, int64_t splits) {
    LoraArgs args = lora_args(rows, terms, splits);
    for (int p = 0; p < n_parts; ++p) {
        add_lora_part(&args, *parts[p].weight, parts[p].out);
    }
    dispatch_half(parts[0].weight->a.dtype(), [&](auto type) {
        run_expand<decltype(type)>(device::cuda_stream_of(stream), args, lora_tiles_of(rows));
    });
}

bool lora_shrink_cuda(const device::Stream &stream, const Tensor &in, const LoraWeight &weight,
                      const LoraRows &rows, const Tensor &terms, PendingLora *pending) {
    if (!is_fast_input(in, weight) ||
        !can_fuse_lora(stream, weight, in.dtype(), weight.out_features())) {
        return false;
    }
    *pending = {&weight, &rows, terms, int64_t(ceil_div(in.size(1), kLoraSplit))};
    if (weight.max_rank() <= kLoraInputRank) {
        pending->in = in;
        return true;
    }
    LoraArgs args = lora_args(rows, terms, pending->splits);
    set_input(&args, in);
    add_lora_part(&args, weight, nullptr);
    dispatch_half(in.dtype(), [&](auto type) {
        run_shrink<decltype(type)>(device::cuda_stream_of(stream), args, lora_tiles_of(rows));
    });
    return true;
}

bool can_fuse_lora(const device::Stream &stream, const LoraWeight &weight, DType dtype,
                   int64_t in_features) {
    const device::CudaStream &cuda_stream = device::cuda_stream_of(stream);
    return cuda_stream.has_pdl && !cuda_stream.is_exact && dtype != LLAISYS_DTYPE_F32 &&
           weight.a.dtype() == dtype && weight.max_rank() <= kLoraFusedRank &&
           in_features % 8 == 0 && in_features <= kLoraNormMaxBlocks * kLoraNormColumns;
}

void lora_norm_cuda(const device::Stream &stream, const LoraNorm &norm, const PendingLora &pending,
                    const LoraWeight *const *weights, int n_parts, const LoraRows &rows,
                    const Tensor &terms) {
    LoraNormArgs args{};
    if (pending.weight != nullptr) {
        args.before = lora_args(*pending.rows, pending.terms, pending.splits);
        add_lora_part(&args.before, *pending.weight, nullptr);
        if (pending.in.defined()) {
            set_input(&args.before, pending.in);
        }
    }
    args.next = lora_args(rows, terms, kLoraNormSplits);
    for (int p = 0; p < n_parts; ++p) {
        add_lora_part(&args.next, *weights[p], nullptr);
    }
    args.residual = norm.residual.as<float>();
    args.ld_residual = norm.residual.stride(0);
    args.normed = norm.normed.data();
    args.ld_normed = norm.normed.stride(0);
    args.weight = reals(norm.weight);
    args.epsilon = norm.epsilon;
    args.tile_parts = lora_tile_parts(args.next.m);
    const auto n_blocks = unsigned(lora_tiles_of(rows) * args.tile_parts * kLoraCluster);
    const int64_t columns = norm.residual.size(1);
    dispatch_half(norm.normed.dtype(), [&](auto type) {
        using T = decltype(type);
        const auto kernel = columns <= kLoraNormColumns       ? lora_norm_kernel<T, 1>
                            : columns <= 2 * kLoraNormColumns ? lora_norm_kernel<T, 2>
                                                              : lora_norm_kernel<T, 4>;
        launch(device::cuda_stream_of(stream), kernel, n_blocks, kThreads, 0,
               {true, unsigned(kLoraCluster)}, args);
    });
}

void lora_swiglu_cuda(const device::Stream &stream, const LoraPart *gate_up, const LoraRows &rows,
                      const Tensor &terms, const LoraWeight *down, const Tensor &down_terms,
                      PendingLora *pending) {
    LoraSwigluArgs args{};
    args.gate_up = lora_args(rows, terms, kLoraNormSplits);
    add_lora_part(&args.gate_up, *gate_up[0].weight, gate_up[0].out);
    add_lora_part(&args.gate_up, *gate_up[1].weight, gate_up[1].out);
    const int64_t chunks = ceil_div(gate_up[0].out->size(1), kLoraSwigluSplit);
    if (down != nullptr) {
        *pending = {down, &rows, down_terms, chunks};
        args.down = lora_args(rows, down_terms, chunks);
        add_lora_part(&args.down, *down, nullptr);
    }
    args.tile_parts = lora_tile_parts(args.gate_up.m);
    const dim3 grid(unsigned(chunks), unsigned(lora_tiles_of(rows) * args.tile_parts));
    dispatch_half(gate_up[0].weight->a.dtype(), [&](auto type) {
        launch(device::cuda_stream_of(stream), lora_swiglu_kernel<decltype(type)>, grid, kThreads,
               0, true, args);
    });
}

} // namespace llaisys::ops
