// ops/attention's kernel for single tokens by itself: microseconds of one layer with many sequences, lists of
// one length and of all lengths, against the bytes it must read. test/cuda/test_cuda_ops.py holds it against
// the CPU's.
//
//   check_decode [time|profile]
#include "common.cuh"

#include "ops/attention/cuda_decode.cuh"

#include <memory>

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

constexpr double kReadBandwidth = 4.39e12; // of an H200, as measured
constexpr int kBlock = 16;                 // entries of a page
constexpr int kD = 128;

// n lists of `mean` entries, or of 1/8 to 15/8 of it; the pages of all lists lie in mixed order.
class Lists {
public:
    Lists(int heads, int kv_heads, int n, int mean, bool is_even)
        : heads_(heads), kv_heads_(kv_heads), n_(n), width_((2 * mean + kBlock) / kBlock),
          k_(size_t(n) * size_t(width_ * kBlock * kv_heads * kD)), v_(k_.size()),
          q_(size_t(n * heads * kD)), out_(q_.size()) {
        fill(k_.get(), k_.size(), 1);
        fill(v_.get(), v_.size(), 2);
        fill(q_.get(), q_.size(), 3);
        std::mt19937 draw(7);
        std::vector<int32_t> tables(size_t(n * width_)), rows(static_cast<size_t>(n)),
            begin(rows.size(), 0), end(rows.size(), mean);
        for (size_t i = 0; i < tables.size(); ++i) {
            tables[i] = int32_t(i);
        }
        std::shuffle(tables.begin(), tables.end(), draw);
        for (int i = 0; i < n; ++i) {
            rows[size_t(i)] = i;
            if (!is_even) {
                end[size_t(i)] = mean / 8 + int(draw() % uint32_t(mean * 7 / 4));
            }
            entries_ += end[size_t(i)];
        }
        tables_ = std::make_unique<Array<int32_t>>(tables);
        rows_ = std::make_unique<Array<int32_t>>(rows);
        begin_ = std::make_unique<Array<int32_t>>(begin);
        end_ = std::make_unique<Array<int32_t>>(end);
    }
    double bytes() const { return double(entries_) * kv_heads_ * kD * 4; }
    void run(CudaStream &stream) const {
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
        run_decode<bf16, kD, 1>(stream, args, nullptr, n_);
    }

private:
    int heads_, kv_heads_, n_, width_;
    double entries_ = 0;
    Array<bf16> k_, v_, q_, out_;
    std::unique_ptr<Array<int32_t>> tables_, rows_, begin_, end_;
};

void time_all(CudaStream &stream) {
    std::printf(
        "\nattention of single tokens, bf16, microseconds (percent of 4.39 TB/s): lists of one "
        "length; of all lengths\n");
    for (const auto &[heads, kv_heads] : {std::pair(12, 2), std::pair(28, 4)}) {
        for (const int n : {32, 64, 128, 256}) {
            std::printf("heads %d/%d, %3d lists of 830:", heads, kv_heads, n);
            for (const bool is_even : {true, false}) {
                // As many as no cache holds, one after the other.
                std::vector<std::unique_ptr<Lists>> layers;
                for (int i = 0; i < std::max(2, 1024 / n); ++i) {
                    layers.push_back(std::make_unique<Lists>(heads, kv_heads, n, 830, is_even));
                }
                const double us = time_of(stream, int(layers.size()),
                                          [&](int i) { layers[size_t(i)]->run(stream); });
                std::printf("  %7.1f (%2.0f%%)", us,
                            100e6 * layers[0]->bytes() / kReadBandwidth / us);
            }
            std::printf("\n");
            std::fflush(stdout);
        }
    }
}

} // namespace

int main(int argc, char **argv) {
    const std::string what = argc > 1 ? argv[1] : "time";
    try {
        CudaStream stream(0);
        if (what == "time") {
            time_all(stream);
        } else {
            Lists(28, 4, 256, 830, true).run(stream);
            Lists(12, 2, 32, 830, true).run(stream);
            LLAISYS_CUDA(cudaStreamSynchronize(stream.stream));
        }
    } catch (const std::exception &error) {
        report(false, error.what());
    }
    return failures() > 0 ? 1 : 0;
}
