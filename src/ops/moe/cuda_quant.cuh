// Experts with quantised weights: the tiles of cuda_gemm.cuh for pairs sorted by expert, and the
// selection of kernels. A pipeline stage has 128 bytes of codes of each row; they are converted as in
// cuda_quant_few.cuh. Bound: DRAM bandwidth for few pairs, conversion and mma.sync for many.
#pragma once

#include "ops/cuda/dispatch.cuh"
#include "ops/moe/cuda_quant_few.cuh"

namespace llaisys::ops::cuda {

// Warps of a block, 32 weight rows each, and pipeline stages.
__host__ __device__ constexpr int moe_quant_warps(int tile_n) { return tile_n >= 128 ? 8 : 4; }
__host__ __device__ constexpr int moe_quant_stages(int tile_n) { return tile_n >= 64 ? 2 : 3; }
// Values of k in a pipeline stage: 128 bytes of codes.
template <QuantCodes Codes> constexpr int kMoeQuantTileK = Codes == QuantCodes::int4 ? 256 : 128;
template <QuantCodes Codes>
__host__ __device__ constexpr uint32_t moe_quant_stage_bytes(int tile_n) {
    return uint32_t(moe_quant_warps(tile_n)) * 32 * 128 +
           uint32_t(tile_n) * kMoeQuantTileK<Codes> * 2;
}

template <typename T, QuantCodes Codes, int TileN, bool IsDown>
__global__ void __launch_bounds__(moe_quant_warps(TileN) * kWarpSize)
    moe_quant_gemm_kernel(MoeArgs<T> args, MoeQuantWeights w) {
    constexpr int kWarps = moe_quant_warps(TileN);
    constexpr int kTileM = 32 * kWarps;
    constexpr int kCopyRows = 4 * kWarps; // that all threads copy at once
    constexpr uint32_t kStage = moe_quant_stage_bytes<Codes>(TileN);
    constexpr int kStages = moe_quant_stages(TileN);
    constexpr int kTileK = kMoeQuantTileK<Codes>;
    constexpr int kParts = kTileK / kMoeTileK;                 // of 64 values
    constexpr uint32_t kPart = uint32_t(TileN) * kMoeRowBytes; // bytes of x
    constexpr int kSegment = int(quant_segment(Codes));
    constexpr int kChunkValues = Codes == QuantCodes::int4 ? 32 : 16; // in 16 bytes of codes
    constexpr int kTileOut = IsDown ? kTileM : kTileM / 2;            // outputs of a block
    constexpr int kNTiles = TileN / 8;
    constexpr int kXRows = TileN / kCopyRows; // rows of x that a thread copies
    extern __shared__ unsigned char dynamic[];
    const uint32_t buffer = (smem_address(dynamic) + 127u) & ~127u;
    unsigned char *staging = dynamic + (buffer - smem_address(dynamic));

    launch_dependents();
    grid_dependency_wait();
    const MoeTile tile = find_moe_tile<TileN>(args.sorted, args.n_experts, int(blockIdx.y));
    if (tile.expert < 0) {
        return;
    }
    const int warp = int(threadIdx.x) / kWarpSize, lane = int(threadIdx.x) % kWarpSize;
    const int n_out = IsDown ? args.hs : args.di;
    const int k = IsDown ? args.di : args.hs;
    const int first_out = int(blockIdx.x) * kTileOut;
    const int64_t expert_row = int64_t(tile.expert) * n_out;
    const QuantMatrix &first = IsDown ? w.down : w.gate;
    const QuantMatrix &second = IsDown ? w.down : w.up;
    // Offset of value `column` of a row, and of the parameters of its segment.
    const int64_t segment_bytes = first.layout.segment_bytes(kSegment);
    const auto codes_at = [&](int column) {
        return column / kSegment * segment_bytes + MoeRows<Codes, 1>::code_bytes(column % kSegment);
    };
    const auto params_at = [&](int column) {
        const int segment = column / kSegment;
        return segment * segment_bytes +
               MoeRows<Codes, 1>::code_bytes(min(kSegment, k - segment * kSegment));
    };
    // Stage row 32 v + r: r below 16 is output 16 v + r of gate, the others are of up; down:
    // output 32 v + r.
    const auto row_of = [&](int row) {
        const bool is_second = !IsDown && row % 32 >= 16;
        const int output = first_out + (IsDown ? row : row / 32 * 16 + row % 16);
        return (is_second ? second : first).bytes +
               (expert_row + min(output, n_out - 1)) * first.row_bytes;
    };

    const int chunk = int(threadIdx.x) % 8, copy_row = int(threadIdx.x) / 8;
    const MoeXRows<T, IsDown, kXRows, kCopyRows> x(args, tile, copy_row);
    const auto load = [&](int k_tile) {
        const uint32_t to = buffer + uint32_t(k_tile % kStages) * kStage;
        const int column = k_tile * kTileK + chunk * kChunkValues;
        const bool has_codes = column < k;
        const int64_t offset = has_codes ? codes_at(column) : 0;
#pragma unroll
        for (int i = 0; i < kTileM / kCopyRows; ++i) {
            cp_async_16(to + swizzle_128b(copy_row + kCopyRows * i, chunk),
                        row_of(copy_row + kCopyRows * i) + offset, has_codes);
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int x_column = k_tile * kTileK + part * kMoeTileK + chunk * 8;
            x.copy(to + kTileM * 128 + uint32_t(part) * kPart, copy_row, chunk, x_column,
                   x_column < k);
        }
    };
    // Rows of the lane: lane / 4 + 8 i of the warp's 32.
    const unsigned char *rows[4];
    int outputs[4];
    QuantParams params[kParts][4];
    const int shift = group_shift(first.layout.group);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = warp * 32 + i * 8 + lane / 4;
        rows[i] = row_of(row);
        outputs[i] = min(first_out + (IsDown ? row : row / 32 * 16 + row % 16), n_out - 1);
    }
    const auto load_part_params = [&](int k_tile, int part) {
        const int column = k_tile * kTileK + part * kMoeTileK + lane % 4 * 16;
        const int64_t offset = column < k ? params_at(column) : 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            params[part][i] = {};
            if (column < k) {
                params[part][i] = load_params(rows[i] + offset, column % kSegment >> shift,
                                              first.layout.param_bytes);
            }
        }
    };
    const int k_tiles = (k + kTileK - 1) / kTileK;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        if (i < k_tiles) {
            load(i);
        }
        cp_async_commit_group();
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        load_part_params(0, part);
    }

    float sums[2][kNTiles][4] = {};
    for (int k_tile = 0; k_tile < k_tiles; ++k_tile) {
        cp_async_wait_group<kStages - 2>();
        __syncthreads();
        if (k_tile + kStages - 1 < k_tiles) {
            load(k_tile + kStages - 1);
        }
        cp_async_commit_group();
        const unsigned char *w_at = staging + uint32_t(k_tile % kStages) * kStage;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            uint32_t values[2][2][8]; // [half][rows 0 to 7, 8 to 15]
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = MoeRows<Codes, 1>::code_bytes(part * kMoeTileK + lane % 4 * 16);
                const auto *codes = reinterpret_cast<const QuantBits<Codes> *>(
                    w_at + swizzle_128b(warp * 32 + i * 8 + lane / 4, at / 16) + at % 16);
                decode_16<T, Codes>(*codes, params[part][i], values[i / 2][i % 2]);
            }
            load_part_params(k_tile + 1, part);
            const unsigned char *x_at = w_at + kTileM * 128 + uint32_t(part) * kPart;
#pragma unroll
            for (int j = 0; j < kNTiles; ++j) {
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    const uint4 b = *reinterpret_cast<const uint4 *>(
                        x_at + swizzle_128b(j * 8 + lane / 4, lane % 4 * 2 + pair));
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        uint32_t a[4];
                        moe_operand(values[half], 2 * pair, a);
                        mma_m16n8k16<T>(sums[half][j], a, b.x, b.y);
                        moe_operand(values[half], 2 * pair + 1, a);
                        mma_m16n8k16<T>(sums[half][j], a, b.z, b.w);
                    }
                }
            }
        }
    }
    cp_async_wait_group<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float factor =
            moe_row_factor<T, Codes>(i < 2 ? first : second, expert_row + outputs[i]);
#pragma unroll
        for (int j = 0; j < kNTiles; ++j) {
            sums[i / 2][j][i % 2 * 2] *= factor;
            sums[i / 2][j][i % 2 * 2 + 1] *= factor;
        }
    }
    store_moe_tile<T, TileN, IsDown, kWarps>(args, tile, sums, staging, first_out);
}

template <QuantCodes Codes> constexpr uint32_t moe_quant_smem(int tile_n, bool is_down) {
    const uint32_t stages =
        uint32_t(moe_quant_stages(tile_n)) * moe_quant_stage_bytes<Codes>(tile_n);
    const int tile_out = (is_down ? 32 : 16) * moe_quant_warps(tile_n);
    const uint32_t out = uint32_t(tile_n) * uint32_t(tile_out + 8) * 2;
    return 128 + (stages > out ? stages : out);
}

template <typename T, QuantCodes Codes, int TileN, bool IsDown>
void moe_quant_gemm(const device::CudaStream &stream, const MoeArgs<T> &args,
                    const MoeQuantWeights &w) {
    const auto kernel = moe_quant_gemm_kernel<T, Codes, TileN, IsDown>;
    const size_t smem = moe_quant_smem<Codes>(TileN, IsDown);
    set_max_dynamic_smem(kernel, smem);
    constexpr int kWarps = moe_quant_warps(TileN);
    const int n_out = IsDown ? args.hs : args.di, tile_out = (IsDown ? 32 : 16) * kWarps;
    launch(stream, kernel, dim3(ceil_div(n_out, tile_out), moe_tiles<TileN>(args)),
           unsigned(kWarps * kWarpSize), smem, true, args, w);
}

// -- Selection ------------------------------------------------------------------------------------

// One product of all pairs. Instantiated once per codes (LLAISYS_MOE_QUANT), in files of their own,
// because they compile slowly.
template <typename T, QuantCodes Codes>
void moe_quant_product_of(const device::CudaStream &stream, const MoeArgs<T> &args,
                          const MoeQuantWeights &w, bool is_few, bool is_down);

template <typename T, QuantCodes Codes>
void run_moe_quant_product(const device::CudaStream &stream, const MoeArgs<T> &args,
                           const MoeQuantWeights &w, bool is_few, bool is_down) {
    if (is_few) {
        return is_down ? moe_quant_few_down<T, Codes>(stream, args, w)
                       : moe_quant_few_gate_up<T, Codes>(stream, args, w);
    }
    const int mean = args.n * args.top_k / args.n_experts;
    const bool fits = size_t(stream.max_shared_bytes) >= moe_quant_smem<Codes>(128, true);
    const int tile = mean < 8 ? 16 : mean < 24 ? 32 : mean < 96 || !fits ? 64 : 128;
    dispatch_int<16, 32, 64, 128>(tile, [&](auto tile_n) {
        is_down ? moe_quant_gemm<T, Codes, tile_n(), true>(stream, args, w)
                : moe_quant_gemm<T, Codes, tile_n(), false>(stream, args, w);
    });
}

template <typename T>
void moe_quant_product(const device::CudaStream &stream, const MoeArgs<T> &args,
                       const MoeQuantWeights &w, bool is_few, bool is_down) {
    dispatch_codes((is_down ? w.down : w.gate).layout.codes, [&](auto codes) {
        moe_quant_product_of<T, codes()>(stream, args, w, is_few, is_down);
    });
}

#define LLAISYS_MOE_QUANT(T, Codes)                                                                \
    template <>                                                                                    \
    void moe_quant_product_of<T, Codes>(const device::CudaStream &stream, const MoeArgs<T> &args,  \
                                        const MoeQuantWeights &w, bool is_few, bool is_down) {     \
        run_moe_quant_product<T, Codes>(stream, args, w, is_few, is_down);                         \
    }

} // namespace llaisys::ops::cuda
