// Decode attention (ops/attention/cuda_decode.cuh) against a naive reference: head_dim 64 and
// 128, groups of 1 to 16, empty, short and long sequences, one split and several. Then
// microseconds of one layer, equal and mixed lengths, against the bytes read.
//
//   check_attention_decode [check|small|time|short|long|profile]      default: time and long
#include "common.cuh"

#include "ops/attention/cuda_decode_launch.cuh"

#include <memory>
#include <utility>

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

constexpr int kBlock = 16; // slots of a KV block

// One launch over sequences of these lengths against the reference.
template <typename T, int D, int HeadTiles>
void check_sequences(CudaStream &stream, int kv_heads, int group, const std::vector<int32_t> &ends,
                     const DecodeTuning &tuning) {
    const int n = int(ends.size());
    const int heads = kv_heads * group;
    const int width = (*std::max_element(ends.begin(), ends.end()) + kBlock) / kBlock;
    const auto q = normal<T>(size_t(n * heads * D), 1);
    const auto k = normal<T>(size_t(n * width * kBlock * kv_heads * D), 2);
    const auto v = normal<T>(k.size(), 3);
    std::vector<int32_t> tables(size_t(n * width)), rows(size_t(n), 0), begin(rows);
    for (size_t i = 0; i < tables.size(); ++i) {
        tables[i] = int32_t(i);
    }
    std::shuffle(tables.begin(), tables.end(), std::mt19937(4));
    for (int t = 0; t < n; ++t) {
        rows[size_t(t)] = n - 1 - t;
        begin[size_t(t)] = t % 3 == 2 ? ends[size_t(t)] / 5 : 0; // sliding window
    }
    const Array<T> on_q(q), on_k(k), on_v(v);
    Array<T> out(q.size());
    out.poison();
    const Array<int32_t> on_tables(tables), on_rows(rows), on_begin(begin), on_end(ends);
    AttentionArgs args{};
    args.q = on_q.get();
    args.out = out.get();
    args.q_token = args.out_token = heads * D;
    args.q_head = args.out_head = D;
    args.k = on_k.get();
    args.v = on_v.get();
    args.q_rows = on_rows.get();
    args.begin = on_begin.get();
    args.end = on_end.get();
    args.tables = on_tables.get();
    args.width = width;
    args.block_size = kBlock;
    args.kv_heads = kv_heads;
    args.group = group;
    args.scale_log2 = 0.13f;
    args.are_settled = true;
    std::vector<float> sinks(size_t(heads), 0.0f); // in every second configuration
    for (int head = 0; head < heads; ++head) {
        sinks[size_t(head)] = float(head % 5) - 1.0f;
    }
    const Array<float> on_sinks(sinks);
    const bool has_sinks = (tuning.stages + tuning.clusters + tuning.warps) % 2 == 1;
    args.sinks = has_sinks ? on_sinks.get() : nullptr;
    run_decode<T, D, HeadTiles>(stream, args, nullptr, n, false, tuning);

    std::vector<double> expected(q.size(), 0.0);
    for (int t = 0; t < n; ++t) {
        for (int head = 0; head < heads; ++head) {
            const size_t at = size_t(t * heads + head) * D;
            std::vector<double> weights;
            double sum = 0;
            const auto entry = [&](int e) {
                const int page = tables[size_t(rows[size_t(t)] * width + e / kBlock)];
                return (size_t(page * kBlock + e % kBlock) * kv_heads + head / group) * D;
            };
            if (has_sinks) {
                sum = std::exp(double(sinks[size_t(head)]));
            }
            for (int e = begin[size_t(t)]; e < ends[size_t(t)]; ++e) {
                double score = 0;
                for (int i = 0; i < D; ++i) {
                    score += double(host_float(q[at + i])) * host_float(k[entry(e) + i]);
                }
                weights.push_back(std::exp2(score * 0.13f));
                sum += weights.back();
            }
            for (int e = begin[size_t(t)]; e < ends[size_t(t)]; ++e) {
                for (int i = 0; i < D; ++i) {
                    expected[at + i] +=
                        weights[size_t(e - begin[size_t(t)])] / sum * host_float(v[entry(e) + i]);
                }
            }
        }
    }
    const Distance found = distance(out.host(), expected);
    const double limit = std::is_same_v<T, bf16> ? 6e-3 : 1e-3;
    report(found.within(limit, 20 * limit),
           line("decode %s heads %d/%d of %d, %d sequences up to %d, %d stages, %d clusters, %d "
                "warps: relative %.2e, largest %.2e",
                name_of<T>(), heads, kv_heads, D, n, *std::max_element(ends.begin(), ends.end()),
                tuning.stages, tuning.clusters, tuning.warps, found.relative, found.largest));
}

template <typename T> void check_all(CudaStream &stream) {
    std::vector<int32_t> many;
    for (int i = 0; i < 70; ++i) {
        many.push_back(i * 37 % 300);
    }
    const std::vector<int32_t> cases[] = {{1}, {2000}, {0, 16, 17, 129, 300, 1000, 5, 640}, many};
    for (const int stages : {2, 3}) {
        const DecodeTuning tuning{0, stages};
        for (const auto &ends : cases) {
            check_sequences<T, 128, 1>(stream, 2, 6, ends, tuning);
            check_sequences<T, 128, 1>(stream, 4, 7, ends, tuning);
            check_sequences<T, 128, 1>(stream, 1, 1, ends, tuning);
            check_sequences<T, 128, 2>(stream, 1, 11, ends, tuning);
            check_sequences<T, 64, 1>(stream, 3, 3, ends, tuning);
            check_sequences<T, 64, 2>(stream, 2, 16, ends, tuning);
        }
    }
    // Two warps per block: more tokens and KV heads than SMs, at all lengths.
    std::vector<int32_t> crowd;
    for (int i = 0; i < 290; ++i) {
        crowd.push_back(i * 37 % 300);
    }
    for (const DecodeTuning &tuning :
         {DecodeTuning{0, 2, 2}, DecodeTuning{0, 3, 2}, DecodeTuning{}}) {
        check_sequences<T, 128, 1>(stream, 2, 6, crowd, tuning);
        check_sequences<T, 128, 2>(stream, 1, 11, crowd, tuning);
        check_sequences<T, 64, 1>(stream, 3, 3, crowd, tuning);
        check_sequences<T, 64, 2>(stream, 1, 16, crowd, tuning);
    }
    // Several clusters per token: splits of all clusters, of a few, and one split in all.
    for (const int clusters : {2, 5, 16}) {
        const DecodeTuning tuning{clusters, 0};
        check_sequences<T, 128, 1>(stream, 2, 8, {9000}, tuning);
        check_sequences<T, 128, 1>(stream, 1, 3, {0, 3000, 17, 129, 5000}, tuning);
        check_sequences<T, 128, 2>(stream, 1, 16, {4200, 100}, tuning);
        check_sequences<T, 64, 1>(stream, 2, 7, {8000, 1, 2100}, tuning);
        check_sequences<T, 64, 2>(stream, 1, 11, {6000}, tuning);
    }
    check_sequences<T, 128, 1>(stream, 1, 4, {30000}, {16, 0});
    // Other head_dim: parts of the combine that straddle heads.
    for (const int clusters : {1, 3}) {
        const DecodeTuning tuning{clusters, 0};
        check_sequences<T, 80, 1>(stream, 2, 5, {3000, 5, 0, 1000}, tuning);
        check_sequences<T, 80, 2>(stream, 1, 11, {2500}, tuning);
        check_sequences<T, 192, 1>(stream, 1, 7, {2500, 129}, tuning);
        check_sequences<T, 256, 1>(stream, 2, 4, {2500, 129}, tuning);
    }
}

// n sequences of `mean` positions, or of 1/8 to 15/8 of it; KV blocks are shuffled.
template <int kD> class Sequences {
public:
    Sequences(int heads, int kv_heads, int n, int mean, bool is_even)
        : heads_(heads), kv_heads_(kv_heads), n_(n), width_((2 * mean + kBlock) / kBlock),
          k_(size_t(n) * size_t(width_ * kBlock * kv_heads * kD)), v_(k_.size()),
          q_(size_t(n * heads * kD)), out_(q_.size()) {
        fill(k_.get(), k_.size(), 1);
        fill(v_.get(), v_.size(), 2);
        fill(q_.get(), q_.size(), 3);
        std::mt19937 sample(7);
        std::vector<int32_t> tables(size_t(n * width_)), rows(static_cast<size_t>(n)),
            begin(rows.size(), 0), end(rows.size(), mean);
        for (size_t i = 0; i < tables.size(); ++i) {
            tables[i] = int32_t(i);
        }
        std::shuffle(tables.begin(), tables.end(), sample);
        for (int i = 0; i < n; ++i) {
            rows[size_t(i)] = i;
            if (!is_even) {
                end[size_t(i)] = mean / 8 + int(sample() % uint32_t(mean * 7 / 4));
            }
            entries_ += end[size_t(i)];
        }
        tables_ = std::make_unique<Array<int32_t>>(tables);
        rows_ = std::make_unique<Array<int32_t>>(rows);
        begin_ = std::make_unique<Array<int32_t>>(begin);
        end_ = std::make_unique<Array<int32_t>>(end);
        std::sort(rows.begin(), rows.end(),
                  [&](int32_t a, int32_t b) { return end[size_t(a)] > end[size_t(b)]; });
        order_ = std::make_unique<Array<int32_t>>(rows);
    }
    double bytes() const { return double(entries_) * kv_heads_ * kD * 4; }
    // is_ordered: longest sequences first.
    void run(CudaStream &stream, const DecodeTuning &tuning = {}, bool is_ordered = false) const {
        AttentionArgs args{};
        args.q = q_.get();
        args.out = out_.get();
        args.q_token = args.out_token = heads_ * kD;
        args.q_head = args.out_head = kD;
        args.k = k_.get();
        args.v = v_.get();
        args.q_rows = rows_->get();
        args.begin = begin_->get();
        args.end = end_->get();
        args.tables = tables_->get();
        args.width = width_;
        args.block_size = kBlock;
        args.kv_heads = kv_heads_;
        args.group = heads_ / kv_heads_;
        args.scale_log2 = 0.1f;
        args.are_settled = true;
        run_decode<bf16, kD, 1>(stream, args, is_ordered ? order_->get() : nullptr, n_, false,
                                tuning);
    }

private:
    int heads_, kv_heads_, n_, width_;
    double entries_ = 0;
    Array<bf16> k_, v_, q_, out_;
    std::unique_ptr<Array<int32_t>> tables_, rows_, begin_, end_, order_;
};

// Sequences of `length` tokens, and of mixed lengths up to it.
template <int D>
void time_length(CudaStream &stream, int length, std::initializer_list<int> counts,
                 std::initializer_list<std::pair<int, int>> head_counts) {
    std::printf(
        "\ndecode attention, bf16, head_dim %d, microseconds (percent of 4.39 TB/s): sequences of "
        "one length; mixed lengths; by warps per block and pipeline stages (0: default), longest "
        "sequences first\n",
        D);
    for (const auto &[heads, kv_heads] : head_counts) {
        for (const int n : counts) {
            std::printf("heads %d/%d, %3d sequences of %d:", heads, kv_heads, n, length);
            for (const bool is_even : {true, false}) {
                // More KV data than L2 holds.
                std::vector<std::unique_ptr<Sequences<D>>> layers;
                for (int i = 0; i < std::max(2, 1024 * 830 / (n * length)); ++i) {
                    layers.push_back(
                        std::make_unique<Sequences<D>>(heads, kv_heads, n, length, is_even));
                }
                const auto time = [&](const DecodeTuning &tuning, bool is_ordered) {
                    const double us = time_of(stream, int(layers.size()), [&](int i) {
                        layers[size_t(i)]->run(stream, tuning, is_ordered);
                    });
                    std::printf("  %dx%d%s %6.1f (%2.0f%%)", tuning.warps, tuning.stages,
                                is_ordered ? " ordered" : "", us,
                                100e6 * layers[0]->bytes() / kReadBandwidth / us);
                };
                for (const auto &[warps, stages] :
                     {std::pair(4, 2), std::pair(4, 3), std::pair(2, 2), std::pair(2, 3)}) {
                    time({0, stages, warps}, false);
                }
                if (!is_even) {
                    time({}, false);
                    time({}, true);
                }
            }
            std::printf("\n");
            std::fflush(stdout);
        }
    }
}

void time_short(CudaStream &stream) {
    time_length<128>(stream, 150, {96, 128, 256}, {{12, 2}, {28, 4}, {32, 8}});
    time_length<64>(stream, 150, {128, 256}, {{14, 2}, {32, 8}});
    time_length<128>(stream, 600, {128, 256}, {{12, 2}, {28, 4}, {32, 8}});
}

void time_all(CudaStream &stream) {
    time_short(stream);
    time_length<128>(stream, 830, {8, 16, 32, 64, 128, 256}, {{12, 2}, {28, 4}, {32, 8}});
}

// Long sequences: splits within one cluster, and over several.
void time_long(CudaStream &stream) {
    std::printf(
        "\ndecode attention of long sequences, bf16, microseconds (percent of 4.39 TB/s): one "
        "cluster; then clusters for 1, 2 and 3 blocks per SM\n");
    for (const auto &[heads, kv_heads] : {std::pair(16, 2), std::pair(28, 4), std::pair(32, 8)}) {
        for (const auto &[n, length] : {std::pair(1, 4200), std::pair(1, 8000), std::pair(1, 30000),
                                        std::pair(1, 128000), std::pair(4, 30000)}) {
            std::vector<std::unique_ptr<Sequences<128>>> layers;
            for (int i = 0; i < 4; ++i) {
                layers.push_back(
                    std::make_unique<Sequences<128>>(heads, kv_heads, n, length, true));
            }
            std::printf("heads %d/%d, %d of %6d:", heads, kv_heads, n, length);
            for (const int blocks : {0, 1, 2, 3}) { // per SM; 0: one cluster per token and KV head
                const int64_t fill = blocks * (stream.n_sms / 16 * 16) / kMaxSplits;
                const int clusters =
                    int(std::clamp<int64_t>(fill / (int64_t(n) * kv_heads), 1, kMaxClusters));
                const double us = time_of(stream, int(layers.size()), [&](int i) {
                    layers[size_t(i)]->run(stream, {clusters, 2});
                });
                std::printf("  %2d clusters %7.1f (%2.0f%%)", clusters, us,
                            100e6 * layers[0]->bytes() / kReadBandwidth / us);
            }
            std::printf("\n");
            std::fflush(stdout);
        }
    }
}

} // namespace

int main(int argc, char **argv) {
    const auto check = [](CudaStream &stream) {
        check_all<bf16>(stream);
        check_all<f16>(stream);
        // As on devices with 99 KB per block, with enough sequences for three stages on others.
        const std::vector<int32_t> sequences(140, 33);
        const int shared_bytes = std::exchange(stream.max_shared_bytes, 99 << 10);
        check_sequences<bf16, 128, 2>(stream, 1, 11, sequences, {});
        check_sequences<f16, 64, 1>(stream, 3, 3, sequences, {});
        stream.max_shared_bytes = shared_bytes;
        std::printf("attention_decode: %d failed\n", failures());
    };
    const auto small = [](CudaStream &stream) { // for compute-sanitizer
        check_sequences<bf16, 128, 1>(stream, 2, 6, {300, 0, 129, 17}, {});
        check_sequences<f16, 64, 2>(stream, 1, 11, {2000}, {0, 3});
        check_sequences<bf16, 128, 1>(stream, 2, 6, std::vector<int32_t>(70, 33), {0, 2, 2});
        check_sequences<bf16, 128, 1>(stream, 2, 8, {3000, 5}, {3, 0});
        check_sequences<bf16, 80, 1>(stream, 1, 5, {2000, 5}, {2, 0});
    };
    const auto profile = [](CudaStream &stream) {
        Sequences<128>(28, 4, 256, 830, true).run(stream);
        Sequences<128>(12, 2, 32, 830, true).run(stream);
        LLAISYS_CUDA(cudaStreamSynchronize(stream.stream));
    };
    return run_stages(argc, argv,
                      {{"check", false, check},
                       {"small", false, small},
                       {"time", true, time_all},
                       {"short", false, time_short},
                       {"long", true, time_long},
                       {"profile", false, profile}});
}
