// LoRA adapters of q, k and v, biases, RoPE and KV store after a GEMM of q, k and v: one kernel.
//
// Block: 16 rows of a LoRA tile; a warp has 32 pairs of one head of every row, 8 adjacent ones per
// lane and row, which is the layout of a LoRA product (ops/cuda/lora_tiles.cuh). Memory-bound.
#include "ops/decoder_layer/cuda_lora_rope.cuh"

#include "ops/cuda/lora_tiles.cuh"
#include "ops/decoder_layer/cuda_rope_kv_store.cuh"

namespace llaisys::ops::cuda {

namespace {

constexpr int kMaxHalf = 128; // pairs of a head

template <typename T>
__global__ void __launch_bounds__(kLoraThreads, 2)
    lora_rope_kv_store_kernel(const __grid_constant__ RopeKvStore<T> pairs,
                              const __grid_constant__ LoraArgs args, const T *qkv, int64_t ld,
                              int tile_parts) {
    using Outputs = LoraWarpOutputs<T, 4>;
    __shared__ LoraTileTerms<3> terms;
    __shared__ float2 angles[kLoraMmaRows][kMaxHalf];
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int g = lane / 4, q = lane % 4;
    LoraWait wait;
    const LoraTile tile = args.tile(int(blockIdx.y) / tile_parts);
    const int at = int(blockIdx.y) % tile_parts * kLoraMmaRows;
    if (at >= tile.count) {
        wait();
        return;
    }
    const int d = pairs.s.d, half = d / 2;
    const int item = int(blockIdx.x) * kLoraWarps + warp;
    const int warps_per_head = half / kLoraBlockK;
    const int head = item / warps_per_head;
    const bool has_head = head < pairs.s.heads();
    const int section = pairs.s.section_of(min(head, pairs.s.heads() - 1));
    const int first = item % warps_per_head * kLoraBlockK;            // pair of the warp
    const int own = (head - pairs.s.first_head(section)) * d + first; // in the section
    typename Outputs::Weights low_b, high_b;
    float scale = 0;
    if (tile.slot >= 0 && has_head) {
        const LoraKernelPart &part = args.parts[section];
        scale = part.scale(tile.slot);
        Outputs(args, part, tile.slot, own).load(0, low_b);
        Outputs(args, part, tile.slot, own + half).load(0, high_b);
    }
    int row[2];
    bool has_row[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        has_row[i] = at + g + 8 * i < tile.count && has_head;
        row[i] = args.rows[tile.first + at + (has_row[i] ? g + 8 * i : 0)];
    }
    const int pair = first + 8 * q;
    float low_bias[8] = {}, high_bias[8] = {};
    if (has_head) {
        load_8(pairs.s.bias_of(section), own + 8 * q, low_bias);
        load_8(pairs.s.bias_of(section), own + half + 8 * q, high_bias);
    }
    // Positions were written before the GEMM started.
    for (int i = threadIdx.x; i < kLoraMmaRows * half; i += kLoraThreads) {
        if (at + i / half < tile.count) {
            float2 &angle = angles[i / half][i % half];
            pairs.sincos(i % half, args.rows[tile.first + at + i / half], &angle.x, &angle.y);
        }
    }
    wait();
    uint4 low[2], high[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const T *from = qkv + row[i] * ld + head * d + pair;
        low[i] = load_16_or_zero(from, has_row[i]);
        high[i] = load_16_or_zero(from + half, has_row[i]);
    }
    if (tile.slot >= 0) {
        terms.load(args, tile, at);
    }
    __syncthreads();
    typename Outputs::Sums low_added = {}, high_added = {};
    for (int r = 0; scale != 0.0f && r < tile.rank; r += kLoraRankStep) {
        if (r > 0) {
            Outputs(args, args.parts[section], tile.slot, own).load(r, low_b);
            Outputs(args, args.parts[section], tile.slot, own + half).load(r, high_b);
        }
        uint32_t operand[4];
        terms.template operand<T>(3 * tile.rank, section * tile.rank + r, scale, operand);
        Outputs::multiply(operand, low_b, low_added);
        Outputs::multiply(operand, high_b, high_added);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (!has_row[i]) {
            continue;
        }
        T *to = pairs.destination(head, pair, row[i], section == 0 ? 0 : pairs.s.slots[row[i]]);
        if (to == nullptr) {
            continue;
        }
        float x[8], y[8], delta[8];
        unpack_8<T>({low[i], {}}, false, x);
        unpack_8<T>({high[i], {}}, false, y);
        Outputs::values(low_added, i, 0, delta);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            x[j] += delta[j] + low_bias[j];
        }
        Outputs::values(high_added, i, 0, delta);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            y[j] += delta[j] + high_bias[j];
            const float2 angle = angles[g + 8 * i][pair + j];
            pairs.rotate(head, angle.x, angle.y, &x[j], &y[j]);
        }
        *reinterpret_cast<uint4 *>(to) = pack_8<T>(x);
        *reinterpret_cast<uint4 *>(to + half) = pack_8<T>(y);
    }
}

} // namespace

bool can_lora_rope(int64_t head_dim) {
    return head_dim % (2 * kLoraBlockK) == 0 && head_dim <= 2 * kMaxHalf;
}

template <typename T>
void lora_rope_kv_store(const device::CudaStream &stream, const RopeKvStore<T> &pairs,
                        const LoraWeight *const *weights, const LoraRows &rows, const Tensor &terms,
                        const T *qkv, int64_t ld) {
    LoraArgs args = lora_args(rows, terms, kLoraNormSplits);
    for (int p = 0; p < 3; ++p) {
        add_lora_part(&args, *weights[p], nullptr);
    }
    const int parts = lora_tile_parts(args.m);
    const int64_t items = int64_t(pairs.s.heads()) * (pairs.s.d / (2 * kLoraBlockK));
    const dim3 grid(unsigned((items + kLoraWarps - 1) / kLoraWarps),
                    unsigned(lora_tiles_of(rows) * parts));
    launch(stream, lora_rope_kv_store_kernel<T>, grid, kLoraThreads, 0, true, pairs, args, qkv, ld,
           parts);
}

template void lora_rope_kv_store(const device::CudaStream &, const RopeKvStore<bf16> &,
                                 const LoraWeight *const *, const LoraRows &, const Tensor &,
                                 const bf16 *, int64_t);
template void lora_rope_kv_store(const device::CudaStream &, const RopeKvStore<f16> &,
                                 const LoraWeight *const *, const LoraRows &, const Tensor &,
                                 const f16 *, int64_t);

} // namespace llaisys::ops::cuda
