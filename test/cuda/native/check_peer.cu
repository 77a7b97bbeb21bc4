// parallel/peer_kernels.cu between ranks on one GPU (a stream each, enqueued by one thread) against
// a naive reference: all dtypes, odd sizes and alignments, one-shot and two-shot, replayed graphs;
// then microseconds per sum, where the memory of a peer is this GPU's own.
//
//   check_peer [check|small|time]      default: check and time
#include "common.cuh"

#include "parallel/peer_kernels.hpp"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>

using namespace llaisys;
using namespace llaisys::parallel;
using function::ReduceOpType;

namespace {

// Ranks with areas of their own; `data` is a buffer per rank.
struct Ranks {
    Ranks(int n, int64_t bytes) : world(n) {
        const int64_t area = cuda_peer_kernels().area_bytes;
        LLAISYS_CUDA(cudaMallocHost(&is_aborted, sizeof(uint32_t)));
        *is_aborted = 0;
        Peers peers;
        peers.world = n;
        peers.is_aborted = is_aborted;
        for (int rank = 0; rank < n; ++rank) {
            void *memory = nullptr;
            LLAISYS_CUDA(cudaMalloc(&memory, size_t(area)));
            LLAISYS_CUDA(cudaMemset(memory, 0, size_t(area)));
            peers.areas[rank] = static_cast<std::byte *>(memory);
            LLAISYS_CUDA(cudaMalloc(&memory, size_t(bytes + 64)));
            data.push_back(static_cast<std::byte *>(memory));
            streams.push_back(std::make_unique<device::Stream>(LLAISYS_DEVICE_NVIDIA, 0, 1));
        }
        for (int rank = 0; rank < n; ++rank) {
            peers.rank = rank;
            of.push_back(peers);
        }
        LLAISYS_CUDA(cudaDeviceSynchronize());
    }
    ~Ranks() {
        cudaDeviceSynchronize();
        for (int rank = 0; rank < world; ++rank) {
            cudaFree(of[0].areas[rank]);
            cudaFree(data[size_t(rank)]);
        }
        cudaFreeHost(is_aborted);
    }
    void put(int rank, const std::vector<std::byte> &values, int64_t offset) {
        LLAISYS_CUDA(cudaMemcpy(data[size_t(rank)] + offset, values.data(), values.size(),
                                cudaMemcpyHostToDevice));
    }
    std::vector<std::byte> get(int rank, int64_t bytes, int64_t offset) {
        std::vector<std::byte> values(static_cast<size_t>(bytes));
        LLAISYS_CUDA(cudaMemcpy(values.data(), data[size_t(rank)] + offset, values.size(),
                                cudaMemcpyDeviceToHost));
        return values;
    }
    void wait() {
        for (const auto &stream : streams) {
            stream->synchronize();
        }
    }

    int world;
    uint32_t *is_aborted = nullptr;
    std::vector<Peers> of;
    std::vector<std::byte *> data;
    std::vector<std::unique_ptr<device::Stream>> streams;
};

template <typename T> std::vector<std::byte> random_bytes(int64_t count, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<std::byte> bytes(size_t(count) * sizeof(T));
    for (int64_t i = 0; i < count; ++i) {
        T value;
        if constexpr (std::is_integral_v<T>) {
            value = T(int32_t(random()));
        } else {
            value = check::host_value<T>(float(int(random() % 8001) - 4000) / 1024);
        }
        std::memcpy(bytes.data() + size_t(i) * sizeof(T), &value, sizeof(T));
    }
    return bytes;
}

template <typename T> T value_at(const std::vector<std::byte> &bytes, int64_t i) {
    T value;
    std::memcpy(&value, bytes.data() + size_t(i) * sizeof(T), sizeof(T));
    return value;
}

template <typename T>
T reduced(const std::vector<std::vector<std::byte>> &in, int64_t i, ReduceOpType op) {
    const auto combine = [op](auto a, auto b) {
        return op == ReduceOpType::kProd  ? a * b
               : op == ReduceOpType::kMin ? std::min(a, b)
               : op == ReduceOpType::kMax ? std::max(a, b)
                                          : a + b;
    };
    if constexpr (std::is_integral_v<T>) {
        T sum = value_at<T>(in[0], i);
        for (size_t r = 1; r < in.size(); ++r) {
            const T next = value_at<T>(in[r], i);
            const bool is_order = op == ReduceOpType::kMin || op == ReduceOpType::kMax;
            sum = is_order ? combine(sum, next) : T(combine(uint64_t(sum), uint64_t(next)));
        }
        return op == ReduceOpType::kAvg ? T(sum / T(in.size())) : sum;
    } else {
        float sum = check::host_float(value_at<T>(in[0], i));
        for (size_t r = 1; r < in.size(); ++r) {
            sum = combine(sum, check::host_float(value_at<T>(in[r], i)));
        }
        return check::host_value<T>(op == ReduceOpType::kAvg ? sum / float(in.size()) : sum);
    }
}

template <typename T>
void check_sum(Ranks &ranks, DType dtype, int64_t count, ReduceOpType op, int64_t offset) {
    std::vector<std::vector<std::byte>> in;
    for (int rank = 0; rank < ranks.world; ++rank) {
        in.push_back(random_bytes<T>(count, uint32_t(rank * 31 + count)));
        ranks.put(rank, in.back(), offset);
    }
    LLAISYS_CUDA(cudaDeviceSynchronize());
    for (int rank = 0; rank < ranks.world; ++rank) {
        cuda_peer_kernels().all_reduce(*ranks.streams[size_t(rank)], ranks.of[size_t(rank)],
                                       ranks.data[size_t(rank)] + offset, count, dtype, op);
    }
    ranks.wait();
    int64_t wrong = 0;
    for (int rank = 0; rank < ranks.world; ++rank) {
        const auto found = ranks.get(rank, count * int64_t(sizeof(T)), offset);
        for (int64_t i = 0; i < count; ++i) {
            const T want = reduced<T>(in, i, op);
            wrong += std::memcmp(found.data() + size_t(i) * sizeof(T), &want, sizeof(T)) != 0;
        }
    }
    check::report(
        wrong == 0,
        check::line("all_reduce %s, op %d, %lld elements, offset %lld, %d ranks: %lld wrong",
                    llaisys::name_of(dtype), int(op), (long long)count, (long long)offset,
                    ranks.world, (long long)wrong));
}

// Sums of the terms, which are at an offset, added to an f32 row of 1, 2, 3 ..
template <typename T> void check_add(Ranks &ranks, DType dtype, int64_t count, int64_t offset) {
    std::vector<std::vector<std::byte>> in;
    std::vector<float *> sums;
    std::vector<float> before(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
        before[size_t(i)] = float(i % 512 + 1);
    }
    for (int rank = 0; rank < ranks.world; ++rank) {
        in.push_back(random_bytes<T>(count, uint32_t(rank * 17 + count)));
        ranks.put(rank, in.back(), offset);
        void *sum = nullptr;
        LLAISYS_CUDA(cudaMalloc(&sum, size_t(count) * 4 + 64));
        sums.push_back(static_cast<float *>(sum) + offset);
        LLAISYS_CUDA(
            cudaMemcpy(sums.back(), before.data(), size_t(count) * 4, cudaMemcpyHostToDevice));
    }
    LLAISYS_CUDA(cudaDeviceSynchronize());
    for (int rank = 0; rank < ranks.world; ++rank) {
        cuda_peer_kernels().all_reduce_add(*ranks.streams[size_t(rank)], ranks.of[size_t(rank)],
                                           sums[size_t(rank)], ranks.data[size_t(rank)] + offset,
                                           count, dtype);
    }
    ranks.wait();
    int64_t wrong = 0;
    for (int rank = 0; rank < ranks.world; ++rank) {
        std::vector<float> found(static_cast<size_t>(count));
        LLAISYS_CUDA(cudaMemcpy(found.data(), sums[size_t(rank)], size_t(count) * 4,
                                cudaMemcpyDeviceToHost));
        LLAISYS_CUDA(cudaFree(sums[size_t(rank)] - offset));
        for (int64_t i = 0; i < count; ++i) {
            const float want =
                before[size_t(i)] + check::host_float(reduced<T>(in, i, ReduceOpType::kSum));
            wrong += found[size_t(i)] != want;
        }
    }
    check::report(wrong == 0,
                  check::line("all_reduce_add %s, %lld elements, offset %lld, %d ranks: %lld wrong",
                              llaisys::name_of(dtype), (long long)count, (long long)offset,
                              ranks.world, (long long)wrong));
}

void check_exchange(Ranks &ranks, int64_t bytes, int from) {
    Ranks &r = ranks;
    std::vector<std::vector<std::byte>> in;
    std::vector<std::byte *> outs;
    for (int rank = 0; rank < r.world; ++rank) {
        in.push_back(random_bytes<int32_t>((bytes + 3) / 4, uint32_t(rank + 77)));
        r.put(rank, in.back(), 0);
        void *out = nullptr;
        LLAISYS_CUDA(cudaMalloc(&out, size_t(bytes * r.world + 64)));
        outs.push_back(static_cast<std::byte *>(out));
    }
    LLAISYS_CUDA(cudaDeviceSynchronize());
    for (int rank = 0; rank < r.world; ++rank) {
        const bool shares = from < 0 || rank == from;
        cuda_peer_kernels().exchange(*r.streams[size_t(rank)], r.of[size_t(rank)],
                                     outs[size_t(rank)], shares ? r.data[size_t(rank)] : nullptr,
                                     bytes, from, bytes);
    }
    r.wait();
    bool is_right = true;
    for (int rank = 0; rank < r.world; ++rank) {
        std::vector<std::byte> found(size_t(bytes) * size_t(r.world));
        LLAISYS_CUDA(
            cudaMemcpy(found.data(), outs[size_t(rank)], found.size(), cudaMemcpyDeviceToHost));
        for (int other = 0; other < r.world; ++other) {
            if (from < 0 || other == 0) {
                const auto &want = in[size_t(from < 0 ? other : from)];
                is_right &=
                    std::memcmp(found.data() + other * bytes, want.data(), size_t(bytes)) == 0;
            }
        }
        cudaFree(outs[size_t(rank)]);
    }
    check::report(is_right, check::line("exchange of %lld bytes, from %d, %d ranks",
                                        (long long)bytes, from, r.world));
}

void check_messages(Ranks &ranks) {
    const auto sent = random_bytes<int32_t>(1000, 5);
    ranks.put(0, sent, 0);
    LLAISYS_CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < 3; ++i) {
        cuda_peer_kernels().send(*ranks.streams[0], ranks.of[0], ranks.data[0] + i, 3999 - i, 1);
        cuda_peer_kernels().recv(*ranks.streams[1], ranks.of[1], ranks.data[1] + 8000 * i, 3999 - i,
                                 0);
    }
    ranks.wait();
    bool is_right = true;
    for (int i = 0; i < 3; ++i) {
        is_right &= std::memcmp(ranks.get(1, 3999 - i, 8000 * i).data(), sent.data() + i,
                                size_t(3999 - i)) == 0;
    }
    check::report(is_right, "three messages from rank 0 to rank 1");
}

void check_abort(Ranks &ranks) {
    cuda_peer_kernels().all_reduce(*ranks.streams[0], ranks.of[0], ranks.data[0], 100,
                                   LLAISYS_DTYPE_F32, ReduceOpType::kSum); // rank 1 never comes
    *static_cast<volatile uint32_t *>(ranks.is_aborted) = 1;
    ranks.streams[0]->synchronize(); // hangs unless the kernel sees the flag
    check::report(true, "an aborted kernel ends");
}

void check_all(bool is_small) {
    for (const int world : {2, 3, 4}) {
        Ranks ranks(world, kPeerChunk);
        for (const int64_t count : {int64_t(1), int64_t(7), int64_t(3584), int64_t(70001)}) {
            for (int op = 0; op < (is_small ? 1 : 5); ++op) {
                check_sum<float>(ranks, LLAISYS_DTYPE_F32, count, ReduceOpType(op), 0);
            }
            check_sum<check::bf16>(ranks, LLAISYS_DTYPE_BF16, count, ReduceOpType::kSum, 2);
            check_sum<check::f16>(ranks, LLAISYS_DTYPE_F16, count, ReduceOpType::kAvg, 0);
            check_sum<int32_t>(ranks, LLAISYS_DTYPE_I32, count, ReduceOpType::kMin, 4);
            check_sum<int64_t>(ranks, LLAISYS_DTYPE_I64, count, ReduceOpType::kSum, 0);
            check_add<float>(ranks, LLAISYS_DTYPE_F32, count, 4);
            check_add<check::bf16>(ranks, LLAISYS_DTYPE_BF16, count, 0);
            check_add<check::f16>(ranks, LLAISYS_DTYPE_F16, count, 2);
        }
        if (!is_small) { // two-shot from three ranks on
            check_sum<check::bf16>(ranks, LLAISYS_DTYPE_BF16, kPeerChunk / 2, ReduceOpType::kSum,
                                   0);
            check_sum<float>(ranks, LLAISYS_DTYPE_F32, kPeerChunk / 4 - 3, ReduceOpType::kSum, 4);
            check_add<check::bf16>(ranks, LLAISYS_DTYPE_BF16, kPeerChunk / 2 - 1, 0);
        }
        check_exchange(ranks, 4097, -1);
        check_exchange(ranks, 64, world - 1);
        check_messages(ranks);
        check_abort(ranks);
    }
}

void time_all() {
    std::printf("\nmicroseconds per all_reduce of bf16 in a captured graph, ranks on one GPU\n%12s",
                "bytes");
    const int worlds[] = {2, 4};
    for (const int world : worlds) {
        std::printf("  %d ranks", world);
    }
    std::printf("\n");
    for (int64_t bytes = 8 << 10; bytes <= (4 << 20); bytes *= 4) {
        std::printf("%12lld", (long long)bytes);
        for (const int world : worlds) {
            Ranks ranks(world, bytes);
            constexpr int kCalls = 200;
            const device::Runtime &runtime = device::cuda_runtime();
            std::vector<void *> graphs; // one per rank
            for (int rank = 0; rank < world; ++rank) {
                const device::Stream &stream = *ranks.streams[size_t(rank)];
                runtime.begin_capture(stream.native());
                for (int i = 0; i < kCalls; ++i) {
                    cuda_peer_kernels().all_reduce(stream, ranks.of[size_t(rank)],
                                                   ranks.data[size_t(rank)], bytes / 2,
                                                   LLAISYS_DTYPE_BF16, ReduceOpType::kSum);
                }
                graphs.push_back(runtime.end_capture(stream.native()));
            }
            const auto run = [&] {
                for (int rank = 0; rank < world; ++rank) {
                    runtime.launch_graph(graphs[size_t(rank)],
                                         ranks.streams[size_t(rank)]->native());
                }
                ranks.wait();
            };
            run();
            const auto start = std::chrono::steady_clock::now();
            run();
            const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
            for (void *graph : graphs) {
                runtime.destroy_graph(graph);
            }
            std::printf("  %7.1f", took.count() / kCalls * 1e6);
        }
        std::printf("\n");
    }
}

} // namespace

int main(int argc, char **argv) {
    // A kernel that is loaded at its first launch waits for the device, on which ranks may spin.
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1); // a queue per stream
    const std::string mode = argc > 1 ? argv[1] : "";
    if (mode != "time") {
        check_all(mode == "small");
    }
    if (mode.empty() || mode == "time") {
        time_all();
    }
    return check::failures() == 0 ? 0 : 1;
}
