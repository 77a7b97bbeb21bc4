// Kernels over peer memory. Every collective uses the same number of blocks, and block b of a rank
// waits for block b of the others only: it reads what they wrote. Data alternates between two
// buffers, so one barrier per call is enough: a rank that writes a buffer again has passed the
// barrier of the call between, which every block of the other ranks enters after it has read the
// buffer.
#include "ops/cuda/dispatch.cuh"
#include "parallel/peer_kernels.hpp"
#include "parallel/reduce_math.hpp"

#include <cstddef>

namespace llaisys::parallel {

namespace {

using function::ReduceOpType;

constexpr int kBlocks = 16;
constexpr int kThreads = 512;
constexpr int kUnit = 16; // bytes of one access
constexpr uint32_t kPollsPerAbortCheck = 1024;
// Two-shot moves fewer bytes and needs a second barrier, which costs as much as this many bytes of
// NVLink traffic.
constexpr int64_t kBarrierBytes = 1 << 20;

// An area. A rank writes to its own one, except for the signals that it gives to others.
struct Area {
    uint32_t epoch[kBlocks];              // barriers of this rank so far
    uint32_t arrived[kBlocks][kMaxPeers]; // the same of each rank, written by that rank
    uint32_t n_sent[kMaxPeers];           // messages to each rank
    uint32_t n_received[kMaxPeers];       // messages from each rank
    uint32_t sent[kMaxPeers];             // n_sent of each rank to this one, written by that rank
    uint32_t received[kMaxPeers];         // n_received of each rank, written by that rank
    alignas(4096) std::byte data[2][kPeerChunk];
    std::byte sums[2][kPeerChunk]; // of a two-shot reduction: this rank's shard
    std::byte messages[kMaxPeers][kPeerMessage];
};

__device__ Area *area(const Peers &peers, int rank) {
    return reinterpret_cast<Area *>(peers.areas[rank]);
}
__device__ Area *own(const Peers &peers) { return area(peers, peers.rank); }

__device__ void store_release(uint32_t *address, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ uint32_t load_acquire(const uint32_t *address) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// Waits until the counter has reached `value`. False: the group was aborted.
__device__ bool wait_for(const Peers &peers, const uint32_t *counter, uint32_t value) {
    for (uint32_t polls = 1; int32_t(load_acquire(counter) - value) < 0; ++polls) {
        if (polls % kPollsPerAbortCheck == 0 && load_acquire(peers.is_aborted) != 0) {
            return false;
        }
    }
    return true;
}

// Publishes what the block has written to its area and waits for the same block of all ranks.
__device__ bool barrier(const Peers &peers, uint32_t epoch) {
    __syncthreads();
    bool is_alive = true;
    if (threadIdx.x < peers.world) {
        store_release(&area(peers, int(threadIdx.x))->arrived[blockIdx.x][peers.rank], epoch);
        is_alive = wait_for(peers, &own(peers)->arrived[blockIdx.x][threadIdx.x], epoch);
    }
    return __syncthreads_and(is_alive) != 0;
}

// Calls body(unit) for the units of [begin, end) that belong to this thread, the same on all ranks.
template <typename Body> __device__ void for_units(int64_t begin, int64_t end, const Body &body) {
    for (int64_t i = begin + int64_t(blockIdx.x) * kThreads + threadIdx.x; i < end;
         i += kBlocks * kThreads) {
        body(i);
    }
}

__device__ uint4 load_unit(const std::byte *from, int64_t unit, int64_t bytes, bool is_aligned) {
    if (is_aligned && (unit + 1) * kUnit <= bytes) {
        return __ldcg(reinterpret_cast<const uint4 *>(from) + unit);
    }
    uint4 value{};
    for (int i = 0; i < kUnit && unit * kUnit + i < bytes; ++i) {
        reinterpret_cast<std::byte *>(&value)[i] = from[unit * kUnit + i];
    }
    return value;
}

__device__ void store_unit(std::byte *to, int64_t unit, int64_t bytes, bool is_aligned,
                           uint4 value) {
    if (is_aligned && (unit + 1) * kUnit <= bytes) {
        reinterpret_cast<uint4 *>(to)[unit] = value;
        return;
    }
    for (int i = 0; i < kUnit && unit * kUnit + i < bytes; ++i) {
        to[unit * kUnit + i] = reinterpret_cast<const std::byte *>(&value)[i];
    }
}

// A unit of an area: aligned, and padded to whole units.
__device__ uint4 load_shared(const std::byte *from, int64_t unit) {
    return __ldcg(reinterpret_cast<const uint4 *>(from) + unit);
}

__device__ bool is_aligned(const void *address) {
    return reinterpret_cast<uintptr_t>(address) % kUnit == 0;
}

// ---- reductions ------------------------------------------------------------------------------------

template <typename T> __device__ Wide<T> widen(T value) {
    if constexpr (std::is_integral_v<T>) {
        return Wide<T>(value);
    } else {
        return ops::cuda::to_float(value);
    }
}

template <typename T> __device__ T narrow(Wide<T> value) {
    if constexpr (std::is_integral_v<T>) {
        return T(value);
    } else {
        return ops::cuda::from_float<T>(value);
    }
}

// Unit `i` of all ranks' data, reduced in rank order.
template <typename T>
__device__ uint4 reduce_unit(const Peers &peers, int buffer, int64_t i, ReduceOpType op) {
    constexpr int kWidth = kUnit / int(sizeof(T));
    uint4 units[kMaxPeers];
#pragma unroll
    for (int rank = 0; rank < kMaxPeers; ++rank) { // all loads are in flight at once
        if (rank < peers.world) {
            units[rank] = load_shared(area(peers, rank)->data[buffer], i);
        }
    }
    Wide<T> sums[kWidth];
#pragma unroll
    for (int rank = 0; rank < kMaxPeers; ++rank) {
        if (rank < peers.world) {
            const T *values = reinterpret_cast<const T *>(&units[rank]);
#pragma unroll
            for (int k = 0; k < kWidth; ++k) {
                sums[k] = rank == 0 ? widen(values[k]) : combine<T>(sums[k], widen(values[k]), op);
            }
        }
    }
    uint4 result;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
        reinterpret_cast<T *>(&result)[k] = narrow<T>(finish<T>(sums[k], op, peers.world));
    }
    return result;
}

// Where a reduction goes: over the data itself, or added to `sum`.
struct Reduced {
    std::byte *data;
    float *sum; // null: over the data

    template <typename T>
    __device__ void store(int64_t unit, int64_t bytes, bool is_data_aligned, uint4 value) const {
        if (sum == nullptr) {
            return store_unit(data, unit, bytes, is_data_aligned, value);
        }
        if constexpr (!std::is_integral_v<T>) {
            constexpr int kWidth = kUnit / int(sizeof(T));
            const T *const values = reinterpret_cast<const T *>(&value);
            float *const to = sum + unit * kWidth;
            if ((unit + 1) * kUnit <= bytes && is_aligned(to)) {
#pragma unroll
                for (int k = 0; k < kWidth; k += 4) {
                    float4 &four = *reinterpret_cast<float4 *>(to + k);
                    const float4 old = four;
                    four = {old.x + widen(values[k]), old.y + widen(values[k + 1]),
                            old.z + widen(values[k + 2]), old.w + widen(values[k + 3])};
                }
                return;
            }
            for (int k = 0; k < kWidth && unit * kUnit + k * int(sizeof(T)) < bytes; ++k) {
                to[k] += widen(values[k]);
            }
        }
    }
};

// One-shot: every rank reads all data. Two-shot: a rank reduces one shard and reads the other
// shards' results.
template <typename T, bool kTwoShot>
__global__ void __launch_bounds__(kThreads)
    all_reduce_kernel(Peers peers, const std::byte *data, Reduced reduced, int64_t bytes,
                      ReduceOpType op) {
    Area *const mine = own(peers);
    const uint32_t epoch = mine->epoch[blockIdx.x];
    const int buffer = int(epoch / 2) & 1;
    const bool aligned = is_aligned(data);
    const int64_t n = (bytes + kUnit - 1) / kUnit;
    const int64_t shard = kTwoShot ? (n + peers.world - 1) / peers.world : n;
    const int n_shards = kTwoShot ? peers.world : 1;
    const auto for_shard = [&](int s, const auto &body) {
        for_units(s * shard, min((s + 1) * shard, n), body);
    };
    for (int s = 0; s < n_shards; ++s) {
        for_shard(s, [&](int64_t i) {
            reinterpret_cast<uint4 *>(mine->data[buffer])[i] = load_unit(data, i, bytes, aligned);
        });
    }
    if (!barrier(peers, epoch + 1)) {
        return;
    }
    if constexpr (!kTwoShot) {
        for_shard(0, [&](int64_t i) {
            reduced.store<T>(i, bytes, aligned, reduce_unit<T>(peers, buffer, i, op));
        });
    } else {
        for_shard(peers.rank, [&](int64_t i) {
            reinterpret_cast<uint4 *>(mine->sums[buffer])[i] = reduce_unit<T>(peers, buffer, i, op);
        });
        if (!barrier(peers, epoch + 2)) {
            return;
        }
        for (int s = 0; s < n_shards; ++s) {
            for_shard(s, [&](int64_t i) {
                reduced.store<T>(i, bytes, aligned, load_shared(area(peers, s)->sums[buffer], i));
            });
        }
    }
    if (threadIdx.x == 0) {
        mine->epoch[blockIdx.x] = epoch + 2;
    }
}

template <typename T>
void run_all_reduce(const device::Stream &stream, const Peers &peers, const std::byte *data,
                    const Reduced &reduced, int64_t count, ReduceOpType op) {
    const int64_t bytes = count * int64_t(sizeof(T));
    const int64_t world = peers.world;
    const bool two_shot = bytes * (world - 1) * (world - 2) / world > kBarrierBytes;
    const auto kernel = two_shot ? all_reduce_kernel<T, true> : all_reduce_kernel<T, false>;
    ops::cuda::launch(device::cuda_stream_of(stream), kernel, kBlocks, kThreads, 0, false, peers,
                      data, reduced, bytes, op);
}

void all_reduce(const device::Stream &stream, const Peers &peers, std::byte *data, int64_t count,
                DType dtype, ReduceOpType op) {
    const Reduced reduced{data, nullptr};
    switch (dtype) {
    case LLAISYS_DTYPE_F32:
        return run_all_reduce<float>(stream, peers, data, reduced, count, op);
    case LLAISYS_DTYPE_F16:
        return run_all_reduce<ops::cuda::f16>(stream, peers, data, reduced, count, op);
    case LLAISYS_DTYPE_BF16:
        return run_all_reduce<ops::cuda::bf16>(stream, peers, data, reduced, count, op);
    case LLAISYS_DTYPE_I32:
        return run_all_reduce<int32_t>(stream, peers, data, reduced, count, op);
    case LLAISYS_DTYPE_I64:
        return run_all_reduce<int64_t>(stream, peers, data, reduced, count, op);
    default:
        fail(LLAISYS_ERROR_UNSUPPORTED, "peer memory does not reduce ", name_of(dtype));
    }
}

void all_reduce_add(const device::Stream &stream, const Peers &peers, float *sum,
                    const std::byte *terms, int64_t count, DType dtype) {
    const auto run = [&](auto type) {
        run_all_reduce<decltype(type)>(stream, peers, terms, {nullptr, sum}, count,
                                       ReduceOpType::kSum);
    };
    return dtype == LLAISYS_DTYPE_F32 ? run(float{}) : ops::cuda::dispatch_half(dtype, run);
}

// ---- copies ----------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads)
    exchange_kernel(Peers peers, std::byte *out, const std::byte *in, int64_t bytes, int from,
                    int64_t stride) {
    Area *const mine = own(peers);
    const uint32_t epoch = mine->epoch[blockIdx.x];
    const int buffer = int(epoch / 2) & 1;
    const int64_t n = (bytes + kUnit - 1) / kUnit;
    if (in != nullptr) {
        const bool aligned = is_aligned(in);
        for_units(0, n, [&](int64_t i) {
            reinterpret_cast<uint4 *>(mine->data[buffer])[i] = load_unit(in, i, bytes, aligned);
        });
    }
    if (!barrier(peers, epoch + 1)) {
        return;
    }
    for (int rank = 0; out != nullptr && rank < peers.world; ++rank) {
        if (from < 0 || rank == from) {
            std::byte *const to = from < 0 ? out + rank * stride : out;
            const bool aligned = is_aligned(to);
            for_units(0, n, [&](int64_t i) {
                store_unit(to, i, bytes, aligned, load_shared(area(peers, rank)->data[buffer], i));
            });
        }
    }
    if (threadIdx.x == 0) {
        mine->epoch[blockIdx.x] = epoch + 2;
    }
}

void exchange(const device::Stream &stream, const Peers &peers, std::byte *out, const std::byte *in,
              int64_t bytes, int from, int64_t stride) {
    ops::cuda::launch(device::cuda_stream_of(stream), exchange_kernel, kBlocks, kThreads, 0, false,
                      peers, out, in, bytes, from, stride);
}

__global__ void __launch_bounds__(kThreads)
    send_kernel(Peers peers, const std::byte *in, int64_t bytes, int to) {
    Area *const mine = own(peers);
    const uint32_t n_sent = mine->n_sent[to];
    const bool is_first = threadIdx.x == 0;
    if (__syncthreads_and(!is_first || wait_for(peers, &mine->received[to], n_sent)) == 0) {
        return;
    }
    for (int64_t i = threadIdx.x; i < bytes; i += kThreads) {
        mine->messages[to][i] = in[i];
    }
    __syncthreads();
    if (is_first) {
        mine->n_sent[to] = n_sent + 1;
        store_release(&area(peers, to)->sent[peers.rank], n_sent + 1);
    }
}

__global__ void __launch_bounds__(kThreads)
    recv_kernel(Peers peers, std::byte *out, int64_t bytes, int from) {
    Area *const mine = own(peers);
    const uint32_t n_received = mine->n_received[from];
    const bool is_first = threadIdx.x == 0;
    if (__syncthreads_and(!is_first || wait_for(peers, &mine->sent[from], n_received + 1)) == 0) {
        return;
    }
    const uint8_t *const message =
        reinterpret_cast<const uint8_t *>(area(peers, from)->messages[peers.rank]);
    for (int64_t i = threadIdx.x; i < bytes; i += kThreads) {
        out[i] = std::byte(__ldcg(message + i));
    }
    __syncthreads();
    if (is_first) {
        mine->n_received[from] = n_received + 1;
        store_release(&area(peers, from)->received[peers.rank], n_received + 1);
    }
}

void send(const device::Stream &stream, const Peers &peers, const std::byte *in, int64_t bytes,
          int to) {
    ops::cuda::launch(device::cuda_stream_of(stream), send_kernel, 1, kThreads, 0, false, peers, in,
                      bytes, to);
}

void recv(const device::Stream &stream, const Peers &peers, std::byte *out, int64_t bytes,
          int from) {
    ops::cuda::launch(device::cuda_stream_of(stream), recv_kernel, 1, kThreads, 0, false, peers,
                      out, bytes, from);
}

// The counters of an area.
struct Counters {
    alignas(Area) std::byte bytes[offsetof(Area, data)];
    const Area &area() const { return *reinterpret_cast<const Area *>(bytes); }
};

bool is_idle(const Peers &peers) {
    const auto read = [&](int rank) {
        Counters counters;
        LLAISYS_CUDA(cudaMemcpy(counters.bytes, peers.areas[rank], sizeof counters.bytes,
                                cudaMemcpyDefault));
        return counters;
    };
    const Counters mine = read(peers.rank);
    for (int rank = 0; rank < peers.world; ++rank) {
        const Counters other = read(rank);
        for (int b = 0; b < kBlocks; ++b) {
            if (int32_t(other.area().epoch[b] - mine.area().epoch[b]) < 0) {
                return false;
            }
        }
        if (mine.area().received[rank] != mine.area().n_sent[rank]) {
            return false;
        }
    }
    return true;
}

} // namespace

const PeerKernels &cuda_peer_kernels() {
    static const PeerKernels kernels{
        int64_t(sizeof(Area)), all_reduce, all_reduce_add, exchange, send, recv, is_idle};
    return kernels;
}

} // namespace llaisys::parallel
