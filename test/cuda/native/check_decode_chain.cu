// The kernels of a decode step as one recorded graph, without an engine around them: what a token costs on
// the device, against the bytes it must read, and what of it each kernel is worth (the same chain without
// it). Random weights; the results are not looked at, other programs check the kernels.
//
//   check_decode_chain time
#include "common.cuh"

#include "ops/attention/cuda_decode.cuh"
#include "ops/cuda/box_ring.cuh"
#include "ops/cuda/few_rows.cuh"
#include "ops/decoder_layer/cuda_uses.cuh"

#include <memory>

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

constexpr double kReadBandwidth = 4.39e12; // of an H200, as measured
constexpr int kBlock = 16;                 // entries of a page

struct Model {
    const char *name;
    int layers, hidden, heads, kv_heads, d, inner, vocabulary;
};
constexpr Model kModels[] = {{"1.5B", 28, 1536, 12, 2, 128, 8960, 151936},
                             {"7B", 28, 3584, 28, 4, 128, 18944, 152064}};

enum Kernel : unsigned { qkv = 1, attention = 2, o = 4, gate_up = 8, down = 16, head = 32 };
constexpr unsigned kAllKernels = 63;
constexpr std::pair<unsigned, const char *> kNames[] = {{qkv, "qkv"},   {attention, "attention"},
                                                        {o, "o"},       {gate_up, "gate/up"},
                                                        {down, "down"}, {head, "head"}};

class Chain {
public:
    Chain(CudaStream &stream, const Model &model, int m, int context)
        : stream_(stream), model_(model), m_(m), context_(context),
          layer_weights_(size_t(model.hidden) * rows_a_layer()),
          weights_(layer_weights_ * size_t(model.layers) +
                   size_t(model.vocabulary) * size_t(model.hidden)),
          n_slots_((context + kBlock) / kBlock * kBlock * m),
          cache_(size_t(2) * size_t(model.layers) * size_t(n_slots_ * model.kv_heads * model.d)),
          residual_(normal<float>(size_t(m * model.hidden), 1)),
          norm_(normal<float>(size_t(model.hidden), 2)), q_(size_t(m * model.heads * model.d)),
          attended_(q_.size()), inner_(size_t(m * model.inner)),
          logits_(size_t(m) * size_t(model.vocabulary)) {
        fill(weights_.get(), weights_.size(), 5);
        fill(cache_.get(), cache_.size(), 6);
        std::vector<int64_t> positions(size_t(m), context - 1);
        std::vector<int32_t> slots, begin(size_t(m), 0), end(size_t(m), context), rows, tables;
        const int width = n_slots_ / m / kBlock;
        for (int r = 0; r < m; ++r) {
            rows.push_back(r);
            slots.push_back(r * width * kBlock + context - 1);
            for (int i = 0; i < width; ++i) {
                tables.push_back(r * width + i);
            }
        }
        std::vector<float> frequencies;
        for (int i = 0; i < model.d / 2; ++i) {
            frequencies.push_back(std::pow(1e4f, -2.0f * float(i) / float(model.d)));
        }
        positions_ = std::make_unique<Array<int64_t>>(positions);
        slots_ = std::make_unique<Array<int32_t>>(slots);
        begin_ = std::make_unique<Array<int32_t>>(begin);
        end_ = std::make_unique<Array<int32_t>>(end);
        rows_ = std::make_unique<Array<int32_t>>(rows);
        tables_ = std::make_unique<Array<int32_t>>(tables);
        frequencies_ = std::make_unique<Array<float>>(frequencies);
    }
    double bytes() const {
        return double(weights_.size()) * 2 +
               double(model_.layers) * 2.0 * m_ * context_ * model_.kv_heads * model_.d * 2;
    }
    // Of one token, in microseconds, with these kernels.
    double time(unsigned kernels, const RingTuning &normed = {}, const RingTuning &streamed = {}) {
        normed_ = normed;
        streamed_ = streamed;
        return time_of(stream_, 1, [&](int) { run(kernels); });
    }

private:
    size_t rows_a_layer() const { // of `hidden` values; down counted as such
        return size_t((model_.heads * 2 + 2 * model_.kv_heads) * model_.d + 3 * model_.inner);
    }
    const bf16 *cache(int layer, int which) const {
        return cache_.get() +
               size_t(2 * layer + which) * size_t(n_slots_ * model_.kv_heads * model_.d);
    }
    FewRowsInput normed() const {
        FewRowsInput in{};
        in.m = m_;
        in.k = model_.hidden;
        in.residual = residual_.get();
        in.ld_residual = model_.hidden;
        in.norm_weight = norm_.get();
        in.epsilon = 1e-6f;
        return in;
    }
    void add(const bf16 *w, const bf16 *x, int k) { // as `linear` has it
        const BoxProduct product{x,   k, w, m_, model_.hidden, k, residual_.get(), model_.hidden,
                                 true};
        if (wants_box_ring(stream_, product)) {
            return run_box_ring<bf16>(stream_, product);
        }
        FewRowsInput in{};
        in.x = x;
        in.ldx = k;
        in.m = m_;
        in.k = k;
        StoreRows<bf16> use{};
        use.w = w;
        use.n = use.ldo = model_.hidden;
        use.k = k;
        use.bias = {nullptr, LLAISYS_DTYPE_F32};
        use.out = {residual_.get(), LLAISYS_DTYPE_F32};
        use.adds = true;
        run_few_rows<bf16>(stream_, in, use, streamed_);
    }
    void run(unsigned kernels) {
        const Model &c = model_;
        const size_t hidden = size_t(c.hidden);
        for (int layer = 0; layer < c.layers; ++layer) {
            const bf16 *w = weights_.get() + layer_weights_ * size_t(layer);
            QkvUse<bf16> use{};
            use.pairs.s = {c.heads,           c.kv_heads,          c.d,           {},
                           positions_->get(), frequencies_->get(), slots_->get(), n_slots_};
            for (int s = 0; s < 3; ++s) {
                use.pairs.s.biases[s] = {nullptr, LLAISYS_DTYPE_F32};
                use.w[s] = w;
                w += size_t((s == 0 ? c.heads : c.kv_heads) * c.d) * hidden;
            }
            use.pairs.q = q_.get();
            use.pairs.q_row = c.heads * c.d;
            use.pairs.k_cache = const_cast<bf16 *>(cache(layer, 0));
            use.pairs.v_cache = const_cast<bf16 *>(cache(layer, 1));
            use.k = c.hidden;
            if (kernels & qkv) {
                run_few_rows<bf16>(stream_, normed(), use, normed_);
            }
            if (kernels & attention) {
                attend(layer);
            }
            if (kernels & o) {
                add(w, attended_.get(), c.heads * c.d);
            }
            w += size_t(c.heads * c.d) * hidden;
            if (kernels & gate_up) {
                run_few_rows<bf16>(stream_, normed(),
                                   SwigluUse<bf16>{w, w + size_t(c.inner) * hidden, c.inner,
                                                   c.hidden, inner_.get(), c.inner, 0},
                                   normed_);
            }
            w += 2 * size_t(c.inner) * hidden;
            if (kernels & down) {
                add(w, inner_.get(), c.inner);
            }
        }
        if (kernels & head) {
            StoreRows<bf16> use{};
            use.w = weights_.get() + layer_weights_ * size_t(c.layers);
            use.n = use.ldo = c.vocabulary;
            use.k = c.hidden;
            use.bias = {nullptr, LLAISYS_DTYPE_F32};
            use.out = {logits_.get(), LLAISYS_DTYPE_F32};
            run_few_rows<bf16>(stream_, normed(), use, normed_);
        }
    }
    void attend(int layer) {
        AttentionArgs args{};
        args.q = q_.get();
        args.out = attended_.get();
        args.q_token = args.out_token = model_.heads * model_.d;
        args.q_head = args.out_head = model_.d;
        args.k = cache(layer, 0);
        args.v = cache(layer, 1);
        args.q_rows = rows_->get();
        args.begin = begin_->get();
        args.end = end_->get();
        args.tables = tables_->get();
        args.width = n_slots_ / m_ / kBlock;
        args.block_size = kBlock;
        args.kv_heads = model_.kv_heads;
        args.group = model_.heads / model_.kv_heads;
        args.scale_log2 = 0.1f;
        args.are_settled = true;
        run_decode<bf16, 128, 1>(stream_, args, nullptr, m_);
    }

    CudaStream &stream_;
    RingTuning normed_, streamed_; // of products that normalise, and of the others
    Model model_;
    int m_, context_;
    size_t layer_weights_;
    Array<bf16> weights_;
    int n_slots_;
    Array<bf16> cache_;
    Array<float> residual_, norm_;
    Array<bf16> q_, attended_, inner_;
    Array<float> logits_;
    std::unique_ptr<Array<int64_t>> positions_;
    std::unique_ptr<Array<int32_t>> slots_, begin_, end_, rows_, tables_;
    std::unique_ptr<Array<float>> frequencies_;
};

void time_all(CudaStream &stream) {
    std::printf("\na decode step on the device: ms, percent of the floor (bytes over 4.39 TB/s); "
                "then what each "
                "kernel is worth, us a layer\n");
    for (const Model &model : kModels) {
        for (const auto &[m, context] :
             {std::pair(1, 128), std::pair(1, 2048), std::pair(2, 1000), std::pair(4, 1000),
              std::pair(5, 200), std::pair(8, 1000), std::pair(16, 1000)}) {
            Chain chain(stream, model, m, context);
            const double all = chain.time(kAllKernels);
            std::printf("%-5s %2d rows, context %4d: %.3f ms (%2.0f%%)", model.name, m, context,
                        all / 1e3, 100e6 * chain.bytes() / kReadBandwidth / all);
            for (const auto &[kernel, name] : kNames) {
                const double without = chain.time(kAllKernels & ~kernel);
                std::printf("  %s %.2f", name,
                            (all - without) / (kernel == head ? 1 : model.layers));
            }
            std::printf("\n");
            std::fflush(stdout);
        }
    }
}

void tune(CudaStream &stream) {
    struct Choice {
        size_t block, early; // KB
    };
    constexpr Choice kNormed[] = {{0, 0}, {0, 36}, {75, 18}, {75, 36}, {150, 18}, {150, 36}};
    constexpr Choice kStreamed[] = {{0, 0}, {0, 36}, {0, 72}, {120, 54}, {170, 54}};
    std::printf(
        "\na decode step, ms; lines: KB a block (0: as it runs) / before the input (likewise) of "
        "products that normalise; "
        "columns: of the others\n");
    for (const Model &model : kModels) {
        for (const auto &[m, context] : {std::pair(1, 128), std::pair(8, 1000)}) {
            Chain chain(stream, model, m, context);
            for (const Choice &n : kNormed) {
                std::printf("%-5s %2d rows %3zu/%zu:", model.name, m, n.block, n.early);
                for (const Choice &s : kStreamed) {
                    std::printf("  %zu/%zu %.3f", s.block, s.early,
                                chain.time(kAllKernels, {n.block * 1000, n.early * 1000},
                                           {s.block * 1000, s.early * 1000}) /
                                    1e3);
                }
                std::printf("\n");
                std::fflush(stdout);
            }
        }
    }
}

} // namespace

int main(int argc, char **argv) {
    return run_stages(argc, argv, {{"time", true, time_all}, {"tune", false, tune}});
}
