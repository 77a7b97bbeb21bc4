// Random collectives compared with a naive reference. Ranks may be threads or processes: they share
// only the group, and each rank derives the inputs of the others from the seed.
#pragma once

#include "parallel/process_group.hpp"
#include "parallel/reduce.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace collectives {

using namespace llaisys;
using namespace llaisys::parallel;
using function::ReduceOpType;

using Bytes = std::vector<std::byte>;

inline const DType kDTypes[] = {LLAISYS_DTYPE_F32, LLAISYS_DTYPE_F16, LLAISYS_DTYPE_BF16,
                                LLAISYS_DTYPE_I32, LLAISYS_DTYPE_I64};

template <typename T> void append(Bytes *bytes, T value) {
    bytes->resize(bytes->size() + sizeof value);
    std::memcpy(bytes->data() + bytes->size() - sizeof value, &value, sizeof value);
}

// `count` values of a rank in a round.
inline Bytes values_of(uint64_t seed, int rank, DType dtype, int64_t count) {
    std::mt19937_64 random(seed * 1000003 + uint64_t(rank));
    Bytes bytes;
    for (int64_t i = 0; i < count; ++i) {
        const float real = float(int64_t(random() % 8001) - 4000) / 1024;
        switch (dtype) {
        case LLAISYS_DTYPE_F32:
            append(&bytes, real);
            break;
        case LLAISYS_DTYPE_F16:
            append(&bytes, from_f32<f16_t>(real));
            break;
        case LLAISYS_DTYPE_BF16:
            append(&bytes, from_f32<bf16_t>(real));
            break;
        case LLAISYS_DTYPE_I32:
            append(&bytes, int32_t(random()));
            break;
        default:
            append(&bytes, int64_t(random()));
        }
    }
    return bytes;
}

template <typename T> T at(const Bytes &bytes, int64_t i) {
    T value;
    std::memcpy(&value, bytes.data() + i * int64_t(sizeof value), sizeof value);
    return value;
}

template <typename T> T combine(ReduceOpType op, T a, T b) {
    switch (op) {
    case ReduceOpType::kProd:
        return a * b;
    case ReduceOpType::kMin:
        return b < a ? b : a;
    case ReduceOpType::kMax:
        return b > a ? b : a;
    default:
        return a + b;
    }
}

template <typename T>
void append_real(Bytes *out, const std::vector<Bytes> &in, int64_t i, ReduceOpType op) {
    float sum = to_f32(at<T>(in[0], i));
    for (size_t r = 1; r < in.size(); ++r) {
        sum = combine(op, sum, to_f32(at<T>(in[r], i)));
    }
    append(out, from_f32<T>(op == ReduceOpType::kAvg ? sum / float(in.size()) : sum));
}

// Sums and products modulo 2^64, truncated to T; min and max compare as T.
template <typename T>
void append_integer(Bytes *out, const std::vector<Bytes> &in, int64_t i, ReduceOpType op) {
    const bool is_order = op == ReduceOpType::kMin || op == ReduceOpType::kMax;
    T sum = at<T>(in[0], i);
    for (size_t r = 1; r < in.size(); ++r) {
        const T next = at<T>(in[r], i);
        sum = is_order ? combine(op, sum, next) : T(combine(op, uint64_t(sum), uint64_t(next)));
    }
    append(out, op == ReduceOpType::kAvg ? T(sum / T(in.size())) : sum);
}

// Element by element, rank by rank.
inline Bytes reduced(const std::vector<Bytes> &in, DType dtype, int64_t count, ReduceOpType op) {
    Bytes out;
    for (int64_t i = 0; i < count; ++i) {
        switch (dtype) {
        case LLAISYS_DTYPE_F32:
            append_real<float>(&out, in, i, op);
            break;
        case LLAISYS_DTYPE_F16:
            append_real<f16_t>(&out, in, i, op);
            break;
        case LLAISYS_DTYPE_BF16:
            append_real<bf16_t>(&out, in, i, op);
            break;
        case LLAISYS_DTYPE_I32:
            append_integer<int32_t>(&out, in, i, op);
            break;
        default:
            append_integer<int64_t>(&out, in, i, op);
        }
    }
    return out;
}

inline tensor_t tensor_of(const Bytes &bytes, DType dtype) {
    const int64_t size = bytes_of(dtype, 1);
    Tensor tensor = Tensor::create({int64_t(bytes.size()) / size}, dtype);
    tensor.load(bytes.data(), bytes.size());
    return tensor;
}

inline bool holds(const tensor_t &tensor, const Bytes &bytes) {
    return tensor.bytes() == int64_t(bytes.size()) &&
           (bytes.empty() || std::memcmp(tensor.data(), bytes.data(), bytes.size()) == 0);
}

// One call of one rank and its expected result.
struct Round {
    static constexpr int kCalls = 7;

    Round(uint64_t seed, int call_, int world_, int rank_)
        : call(call_), world(world_), rank(rank_) {
        std::mt19937_64 random(seed);
        // Mostly sizes of a decode step; some empty, odd or larger than a chunk.
        static const int64_t sizes[] = {0, 1, 3, 64, 257, 896, 1000, 4099, 70001};
        count = sizes[random() % 100 < 97 ? random() % 8 : 8];
        dtype = kDTypes[random() % 5];
        op = ReduceOpType(random() % 5);
        root = int(random() % uint64_t(world));
        for (int r = 0; r < world; ++r) {
            inputs.push_back(values_of(seed, r, dtype, count_of(r)));
        }
    }

    // Elements that a rank passes in.
    int64_t count_of(int) const { return call == 2 || call == 4 ? count * world : count; }

    int64_t size() const { return bytes_of(dtype, 1); }
    Bytes part(const Bytes &all, int r) const {
        const int64_t bytes = count * size();
        return Bytes(all.begin() + r * bytes, all.begin() + (r + 1) * bytes);
    }
    Bytes joined() const {
        Bytes all;
        for (const Bytes &input : inputs) {
            std::copy(input.begin(), input.end(), std::back_inserter(all));
        }
        return all;
    }

    std::shared_ptr<Work> start(const ProcessGroup &group, bool async) {
        const tensor_t own = tensor_of(inputs[size_t(rank)], dtype);
        const tensor_t one = Tensor::create({count}, dtype);
        const tensor_t all = Tensor::create({count * world}, dtype);
        switch (call) {
        case 0:
            result = own;
            expected = reduced(inputs, dtype, count, op);
            return group.AllReduce(own, op, async);
        case 1:
            result = all;
            expected = joined();
            return group.AllGather(all, own, async);
        case 2:
            result = one;
            expected = part(reduced(inputs, dtype, count * world, op), rank);
            return group.ReduceScatter(one, own, op, async);
        case 3:
            result = own;
            expected = inputs[size_t(root)];
            return group.BroadCast(own, root, async);
        case 4:
            result = one;
            expected = part(inputs[size_t(root)], rank);
            return group.Scatter(one, rank == root ? own : tensor_t(), root, async);
        case 5:
            result = rank == root ? all : own;
            expected = rank == root ? joined() : inputs[size_t(rank)];
            return group.Gather(rank == root ? all : tensor_t(), own, root, async);
        default: // each rank sends to the next one
            result = one;
            expected = inputs[size_t((rank + world - 1) % world)];
            return pass_on(group, one, own, async);
        }
    }

    // Every second rank receives first: if all sent, all would wait.
    std::shared_ptr<Work> pass_on(const ProcessGroup &group, const tensor_t &in,
                                  const tensor_t &out, bool async) const {
        const int left = (rank + world - 1) % world;
        const int right = (rank + 1) % world;
        if (rank % 2 == 0) {
            group.Send(out, right, async);
            return group.Recv(in, left, async);
        }
        const std::shared_ptr<Work> received = group.Recv(in, left, async);
        group.Send(out, right, async);
        return received;
    }

    bool is_right() const { return holds(result, expected); }
    std::string text() const {
        return llaisys::text("call ", call, ", ", name_of(dtype), ", ", reduce_op_name(op), ", ",
                             count, " elements, root ", root, ", rank ", rank, " of ", world);
    }

    int call;
    int world;
    int rank;
    int64_t count;
    DType dtype;
    ReduceOpType op;
    int root;
    std::vector<Bytes> inputs;
    tensor_t result;
    Bytes expected;
};

// Runs n rounds; describes the first wrong one, or "".
inline std::string run_rounds(const ProcessGroup &group, uint64_t seed, int n) {
    for (int i = 0; i < n; ++i) {
        std::mt19937_64 random(seed + uint64_t(i));
        Round round(random(), int(random() % Round::kCalls), group.size(), group.rank());
        round.start(group, false);
        if (!round.is_right()) {
            return text("round ", i, ": ", round.text());
        }
    }
    return "";
}

// run_rounds with asynchronous calls, waited for in another order.
inline std::string run_async_rounds(const ProcessGroup &group, uint64_t seed, int n_batches) {
    for (int batch = 0; batch < n_batches; ++batch) {
        std::mt19937_64 random(seed + uint64_t(batch));
        std::vector<Round> all;
        std::vector<std::shared_ptr<Work>> works;
        for (int i = 0; i < 8; ++i) {
            all.emplace_back(random(), int(random() % Round::kCalls), group.size(), group.rank());
        }
        for (Round &round : all) {
            works.push_back(round.start(group, true));
        }
        std::mt19937_64 own(seed + uint64_t(group.rank()));
        std::vector<size_t> order{0, 1, 2, 3, 4, 5, 6, 7};
        std::shuffle(order.begin(), order.end(), own);
        for (size_t i : order) {
            if (!works[i]->WaitBlocking() || !works[i]->IsCompleted() || !works[i]->IsSuccess() ||
                works[i]->exception() != nullptr || !all[i].is_right()) {
                return text("batch ", batch, ": ", all[i].text());
            }
        }
    }
    return "";
}

// Runs body(rank) in a thread per rank; what each returned, or the text of its exception.
inline std::vector<std::string> run_ranks(int world, const std::function<std::string(int)> &body) {
    std::vector<std::string> results(static_cast<size_t>(world));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world; ++rank) {
        threads.emplace_back([&, rank] {
            try {
                results[size_t(rank)] = body(rank);
            } catch (const std::exception &error) {
                results[size_t(rank)] = error.what();
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    return results;
}

inline bool contains(const std::string &text, const char *part) {
    return text.find(part) != std::string::npos;
}

} // namespace collectives
