// ColumnParallelLinear and RowParallelLinear compared with the unsharded product.
#include "check.hpp"
#include "ops/rearrange/op.hpp"
#include "parallel/process_group_host.hpp"
#include "parallel/tensor_parallel.hpp"

#include <mutex>
#include <thread>

namespace {

using namespace llaisys;
using namespace llaisys::parallel;

constexpr int64_t kIn = 24;
constexpr int64_t kOut = 40;
constexpr int64_t kRows = 3;

// Small integers: sums are exact in any order.
tensor_t numbers(const Shape &shape, int seed) {
    const tensor_t tensor = Tensor::create(shape, LLAISYS_DTYPE_F32);
    for (int64_t i = 0; i < tensor.elements(); ++i) {
        tensor.as<float>()[i] = float((i * 7 + seed * 13) % 11 - 5);
    }
    return tensor;
}

std::vector<float> values(const tensor_t &tensor) {
    return {tensor.as<float>(), tensor.as<float>() + tensor.elements()};
}

const tensor_t &weight() {
    static const tensor_t tensor = numbers({kOut, kIn}, 1);
    return tensor;
}
const tensor_t &bias() {
    static const tensor_t tensor = numbers({kOut}, 2);
    return tensor;
}
const tensor_t &input() {
    static const tensor_t tensor = numbers({kRows, kIn}, 3);
    return tensor;
}

std::vector<float> whole_product(bool with_bias) {
    std::vector<float> out;
    for (int64_t i = 0; i < kRows; ++i) {
        for (int64_t o = 0; o < kOut; ++o) {
            float sum = with_bias ? bias().as<float>()[o] : 0.0f;
            for (int64_t k = 0; k < kIn; ++k) {
                sum += input().as<float>()[i * kIn + k] * weight().as<float>()[o * kIn + k];
            }
            out.push_back(sum);
        }
    }
    return out;
}

tensor_t part(const tensor_t &tensor, int dim, int rank, int ranks) {
    const int64_t chunk = tensor.size(dim) / ranks;
    const device::Stream stream(LLAISYS_DEVICE_CPU, 0, 1);
    return ops::contiguous(stream, tensor.slice(dim, rank * chunk, (rank + 1) * chunk));
}

// Runs body(group, stream) on each rank; the first error.
template <typename Body> std::string on_ranks(int ranks, const Body &body) {
    std::string wrong;
    std::mutex mutex;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] {
            GroupOptions options;
            options.name = "linear";
            options.ranks.clear();
            for (int i = 0; i < ranks; ++i) {
                options.ranks.push_back(i);
            }
            options.rank = rank;
            std::string result;
            try {
                const auto group = ProcessGroupFactory::Instance().GetOrCreate("threads", options);
                const device::Stream stream(LLAISYS_DEVICE_CPU, 0, 1);
                result = body(group, stream);
            } catch (const std::exception &error) {
                result = error.what();
            }
            std::lock_guard<std::mutex> lock(mutex);
            wrong = wrong.empty() ? result : wrong;
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    return wrong;
}

using Group = std::shared_ptr<ProcessGroup>;

} // namespace

TEST(gathered_column_parallel_output_equals_the_unsharded_product) {
    for (const int ranks : {1, 2, 4, 5}) {
        CHECK_EQ(on_ranks(ranks,
                          [&](const Group &group, const device::Stream &stream) -> std::string {
                              ColumnParallelLinear layer(kIn, kOut, true, true, true, false, false,
                                                         group);
                              const tensor_t own = part(bias(), 0, group->rank(), ranks);
                              layer.Load(stream, part(weight(), 0, group->rank(), ranks), &own);
                              const auto out = layer.Forward({input()});
                              return out.size() == 1 && values(out[0]) == whole_product(true)
                                         ? ""
                                         : "wrong";
                          }),
                 "");
    }
}

TEST(column_parallel_then_row_parallel_needs_one_all_reduce) {
    // As in a decoder layer: the output shard of the first is the input shard of the second.
    const tensor_t second = numbers({7, kOut}, 4);
    const tensor_t second_bias = numbers({7}, 5);
    const std::vector<float> hidden = whole_product(false);
    std::vector<float> expected;
    for (int64_t i = 0; i < kRows; ++i) {
        for (int64_t o = 0; o < 7; ++o) {
            float sum = second_bias.as<float>()[o];
            for (int64_t k = 0; k < kOut; ++k) {
                sum += hidden[size_t(i * kOut + k)] * second.as<float>()[o * kOut + k];
            }
            expected.push_back(sum);
        }
    }
    for (const int ranks : {1, 2, 4}) {
        CHECK_EQ(
            on_ranks(ranks,
                     [&](const Group &group, const device::Stream &stream) -> std::string {
                         ColumnParallelLinear up(kIn, kOut, false, false, true, false, false,
                                                 group);
                         RowParallelLinear down(kOut, 7, true, true, true, false, false, group);
                         up.Load(stream, part(weight(), 0, group->rank(), ranks), nullptr);
                         down.Load(stream, part(second, 1, group->rank(), ranks), &second_bias);
                         const auto out = down.Forward(up.Forward({input()}));
                         return values(out[0]) == expected ? "" : "wrong";
                     }),
            "");
    }
}

TEST(row_parallel_layer_reads_its_columns_of_an_unsharded_input) {
    CHECK_EQ(on_ranks(3,
                      [&](const Group &group, const device::Stream &stream) -> std::string {
                          RowParallelLinear layer(kIn, kOut, true, true, false, false, false,
                                                  group);
                          layer.Load(stream, part(weight(), 1, group->rank(), 3), &bias());
                          const auto out = layer.Forward({input()});
                          return values(out[0]) == whole_product(true) ? "" : "wrong";
                      }),
             "");
}

TEST(without_reduce_output_each_rank_returns_its_term_and_rank_0_adds_the_bias) {
    CHECK_EQ(on_ranks(2,
                      [&](const Group &group, const device::Stream &stream) -> std::string {
                          RowParallelLinear layer(kIn, kOut, true, false, false, false, false,
                                                  group);
                          layer.Load(stream, part(weight(), 1, group->rank(), 2), &bias());
                          const auto out = layer.Forward({input()});
                          if (values(out[0]) == whole_product(true)) {
                              return "already summed";
                          }
                          group->AllReduce(out[0]);
                          return values(out[0]) == whole_product(true) ? "" : "wrong";
                      }),
             "");
}

TEST(skipped_bias_is_returned) {
    const device::Stream stream(LLAISYS_DEVICE_CPU, 0, 1);
    ColumnParallelLinear layer(kIn, kOut, true, false, false, true); // the default group: of one
    layer.Load(stream, weight(), &bias());
    const auto out = layer.Forward({input()});
    CHECK_EQ(out.size(), size_t(2));
    CHECK(values(out[0]) == whole_product(false));
    CHECK(values(out[1]) == values(bias()));
}

TEST(invalid_shapes_are_rejected) {
    const device::Stream stream(LLAISYS_DEVICE_CPU, 0, 1);
    RowParallelLinear layer(kIn, kOut, false, true, true, false);
    CHECK_THROWS(layer.Forward({input()}), "Forward before Load");
    CHECK_THROWS(layer.Load(stream, input(), nullptr), "holds [40, 24], got [3, 24]");
    CHECK_THROWS(layer.Load(stream, weight(), &bias()), "bias: got one, expected none");
    layer.Load(stream, weight(), nullptr);
    CHECK_THROWS(layer.Forward({weight(), weight()}), "one tensor, got 2");
    CHECK_THROWS(layer.Forward({bias()}), "[n, 24], got [40]");
    CHECK_THROWS(ColumnParallelLinear(kIn, kOut, false, false, true, false, true),
                 "sequence_parallel");
    CHECK_EQ(on_ranks(3,
                      [](const Group &group, const device::Stream &) -> std::string {
                          ColumnParallelLinear(kIn, kOut, false, false, true, false, false, group);
                          return "";
                      }),
             "out_features must be divisible by the number of ranks, 3, got 40");
}
