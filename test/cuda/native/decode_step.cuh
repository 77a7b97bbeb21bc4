// The kernels of a decode step over random weights, as the engine queues them.
#pragma once

#include "common.cuh"

#include "device/cuda/cublaslt_gemm.hpp"
#include "ops/attention/cuda_decode_launch.cuh"
#include "ops/cuda/gemm_small_m.cuh"
#include "ops/cuda/gemm_tma_m96.cuh"
#include "ops/cuda/gemm_tma_splitk.cuh"
#include "ops/cuda/rms_norm_rows.cuh"
#include "ops/cuda/swiglu_rows.cuh"
#include "ops/decoder_layer/cuda_rope_kv_store.cuh"

#include <memory>

namespace check {

using namespace llaisys::ops::cuda;

inline constexpr int kBlock = 16; // slots of a KV block

struct Model {
    const char *name;
    int layers, hidden, heads, kv_heads, d, inner, vocabulary;
};
inline constexpr Model kModels[] = {{"1.5B", 28, 1536, 12, 2, 128, 8960, 151936},
                                    {"7B", 28, 3584, 28, 4, 128, 18944, 152064}};

enum Kernel : unsigned { qkv = 1, attention = 2, o = 4, gate_up = 8, down = 16, head = 32 };
inline constexpr unsigned kAllKernels = 63;
inline constexpr std::pair<unsigned, const char *> kNames[] = {
    {qkv, "qkv"},         {attention, "attention"}, {o, "o"},
    {gate_up, "gate/up"}, {down, "down"},           {head, "head"}};

// More than 16 rows: tuning of gemm_tma_m96.cuh per GEMM, or cuBLASLt (cluster 0).
struct M96Path {
    M96Tuning qkv{0}, o{0}, gate_up{0}, down{0};

    static M96Path usual(int hidden, int inner, int m) {
        return {m96_qkv_tuning(m, hidden), m96_residual_tuning(m, hidden, hidden),
                m96_gate_up_tuning(m, hidden), m96_residual_tuning(m, hidden, inner)};
    }
};

class DecodeStep {
public:
    DecodeStep(CudaStream &stream, const Model &model, int m, int context)
        : stream_(stream), model_(model), m_(m), context_(context),
          layer_weights_(size_t(model.hidden) * rows_per_layer()),
          weights_(layer_weights_ * size_t(model.layers) +
                   size_t(model.vocabulary) * size_t(model.hidden)),
          n_slots_((context + kBlock) / kBlock * kBlock * m),
          cache_(size_t(2) * size_t(model.layers) * size_t(n_slots_ * model.kv_heads * model.d)),
          residual_(normal<float>(size_t(m * model.hidden), 1)),
          norm_(normal<float>(size_t(model.hidden), 2)), q_(size_t(m * model.heads * model.d)),
          attended_(q_.size()), inner_(size_t(m * model.inner)),
          logits_(size_t(m) * size_t(model.vocabulary)), normed_rows_(residual_.size()),
          qkv_(size_t(m) * size_t((model.heads + 2 * model.kv_heads) * model.d)),
          gate_up_(2 * inner_.size()) {
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
    // Microseconds of one step with these kernels.
    double time(unsigned kernels, const BulkTuning &normed = {}, const BulkTuning &streamed = {}) {
        normed_ = normed;
        streamed_ = streamed;
        return time_of(stream_, 1, [&](int) { run(kernels); });
    }

    // The same for more than 16 rows.
    double time(unsigned kernels, const M96Path &path) {
        path_ = path;
        return time_of(stream_, 1, [&](int) { run(kernels); });
    }
    bool fits(const M96Path &path) const {
        const auto one = [&](const M96Tuning &t, int64_t n, int64_t k, int64_t atoms_per_head) {
            const AtomLayout<bf16> places{nullptr, 8, 8, 8, atoms_per_head, n / 16};
            return t.cluster == 0 ||
                   m96_config(stream_, places, k, m96_columns(m_), t).fits(stream_);
        };
        const Model &c = model_;
        return one(path.qkv, (c.heads + 2 * c.kv_heads) * c.d, c.hidden, c.d / 16) &&
               one(path.o, c.hidden, c.heads * c.d, c.hidden / 16) &&
               one(path.gate_up, 2 * c.inner, c.hidden, c.inner / 8) &&
               one(path.down, c.hidden, c.inner, c.hidden / 16);
    }

private:
    size_t rows_per_layer() const { // of `hidden` values, down projection included
        return size_t((model_.heads * 2 + 2 * model_.kv_heads) * model_.d + 3 * model_.inner);
    }
    const bf16 *cache(int layer, int which) const {
        return cache_.get() +
               size_t(2 * layer + which) * size_t(n_slots_ * model_.kv_heads * model_.d);
    }
    GemmInput normed() const {
        GemmInput in{};
        in.m = m_;
        in.k = model_.hidden;
        in.residual = residual_.get();
        in.ld_residual = model_.hidden;
        in.norm_weight = norm_.get();
        in.epsilon = 1e-6f;
        return in;
    }
    void add(const bf16 *w, const bf16 *x, int k) { // as in `linear`
        const SplitKProblem product{x,   k, w, m_, model_.hidden, k, residual_.get(), model_.hidden,
                                    true};
        if (prefers_gemm_tma_splitk(stream_, product)) {
            return run_gemm_tma_splitk<bf16>(stream_, product);
        }
        GemmInput in{};
        in.x = x;
        in.ldx = k;
        in.m = m_;
        in.k = k;
        LinearEpilogue<bf16> epilogue{};
        epilogue.w = w;
        epilogue.n = epilogue.ldo = model_.hidden;
        epilogue.k = k;
        epilogue.bias = {nullptr, LLAISYS_DTYPE_F32};
        epilogue.out = {residual_.get(), LLAISYS_DTYPE_F32};
        epilogue.adds = true;
        run_gemm_small_m<bf16>(stream_, in, epilogue, streamed_);
    }
    GemmInput streamed(const bf16 *x, int k) const {
        GemmInput in{};
        in.x = x;
        in.ldx = k;
        in.m = m_;
        in.k = k;
        return in;
    }
    GemmInput norm() { // separate norm kernel
        rms_norm_rows<bf16>(stream_, normed_rows_.get(), model_.hidden, residual_.get(),
                            model_.hidden, nullptr, norm_.get(), m_, model_.hidden, 1e-6f);
        return streamed(normed_rows_.get(), model_.hidden);
    }
    void multiply(const bf16 *w, const GemmInput &in, int n, void *out, bool is_wide, bool adds) {
        stream_.products->run(stream_.stream,
                              {m_, n, in.k, LLAISYS_DTYPE_BF16, in.x, in.ldx, w, out, n,
                               is_wide ? LLAISYS_DTYPE_F32 : LLAISYS_DTYPE_BF16, adds},
                              true);
    }
    void qkv_large_m(QkvEpilogue<bf16> epilogue) {
        const GemmInput in = norm();
        if (path_.qkv.cluster > 0) {
            return run_gemm_tma_m96<bf16>(stream_, in, epilogue, path_.qkv);
        }
        const int n = epilogue.pairs.s.heads() * model_.d;
        multiply(epilogue.w[0], in, n, qkv_.get(), false, false);
        rope_kv_store<bf16>(stream_, epilogue.pairs, {}, qkv_.get(), n, m_);
    }
    void gate_up_large_m(const SwigluEpilogue<bf16> &epilogue) {
        const GemmInput in = norm();
        if (path_.gate_up.cluster > 0) {
            return run_gemm_tma_m96<bf16>(stream_, in, epilogue, path_.gate_up);
        }
        const int n = model_.inner;
        multiply(epilogue.gate, in, 2 * n, gate_up_.get(), false, false);
        swiglu_rows<bf16>(stream_, epilogue.out, n, gate_up_.get(), 2 * n, gate_up_.get() + n,
                          2 * n, m_, n);
    }
    void add_large_m(const bf16 *w, const GemmInput &in, const M96Tuning &tuning) {
        if (tuning.cluster > 0) {
            LinearEpilogue<bf16> epilogue{};
            epilogue.w = w;
            epilogue.n = epilogue.ldo = model_.hidden;
            epilogue.k = in.k;
            epilogue.bias = {nullptr, LLAISYS_DTYPE_F32};
            epilogue.out = {residual_.get(), LLAISYS_DTYPE_F32};
            epilogue.adds = true;
            return run_gemm_tma_m96<bf16>(stream_, in, epilogue, tuning);
        }
        multiply(w, in, model_.hidden, residual_.get(), true, true);
    }
    void run(unsigned kernels) {
        const Model &c = model_;
        const bool are_many = m_ > kSmallM;
        const size_t hidden = size_t(c.hidden);
        for (int layer = 0; layer < c.layers; ++layer) {
            const bf16 *w = weights_.get() + layer_weights_ * size_t(layer);
            QkvEpilogue<bf16> epilogue{};
            epilogue.pairs.s = {c.heads,           c.kv_heads,          c.d,           {},
                                positions_->get(), frequencies_->get(), slots_->get(), n_slots_};
            for (int s = 0; s < 3; ++s) {
                epilogue.pairs.s.biases[s] = {nullptr, LLAISYS_DTYPE_F32};
                epilogue.w[s] = w;
                w += size_t((s == 0 ? c.heads : c.kv_heads) * c.d) * hidden;
            }
            epilogue.pairs.q = q_.get();
            epilogue.pairs.q_row = c.heads * c.d;
            epilogue.pairs.k_cache = const_cast<bf16 *>(cache(layer, 0));
            epilogue.pairs.v_cache = const_cast<bf16 *>(cache(layer, 1));
            epilogue.k = c.hidden;
            if (kernels & qkv && are_many) {
                qkv_large_m(epilogue);
            } else if (kernels & qkv) {
                run_gemm_small_m<bf16>(stream_, normed(), epilogue, normed_);
            }
            if (kernels & attention) {
                attend(layer);
            }
            if (kernels & o && are_many) {
                add_large_m(w, streamed(attended_.get(), c.heads * c.d), path_.o);
            } else if (kernels & o) {
                add(w, attended_.get(), c.heads * c.d);
            }
            w += size_t(c.heads * c.d) * hidden;
            const SwigluEpilogue<bf16> swiglu{
                w, w + size_t(c.inner) * hidden, c.inner, c.hidden, inner_.get(), c.inner, 0};
            if (kernels & gate_up && are_many) {
                gate_up_large_m(swiglu);
            } else if (kernels & gate_up) {
                run_gemm_small_m<bf16>(stream_, normed(), swiglu, normed_);
            }
            w += 2 * size_t(c.inner) * hidden;
            if (kernels & down && are_many) {
                add_large_m(w, streamed(inner_.get(), c.inner), path_.down);
            } else if (kernels & down) {
                add(w, inner_.get(), c.inner);
            }
        }
        if (kernels & head && are_many) {
            multiply(weights_.get() + layer_weights_ * size_t(c.layers), norm(), c.vocabulary,
                     logits_.get(), true, false);
        } else if (kernels & head) {
            LinearEpilogue<bf16> epilogue{};
            epilogue.w = weights_.get() + layer_weights_ * size_t(c.layers);
            epilogue.n = epilogue.ldo = c.vocabulary;
            epilogue.k = c.hidden;
            epilogue.bias = {nullptr, LLAISYS_DTYPE_F32};
            epilogue.out = {logits_.get(), LLAISYS_DTYPE_F32};
            run_gemm_small_m<bf16>(stream_, normed(), epilogue, normed_);
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
    BulkTuning normed_, streamed_; // of GEMMs with a fused norm, and of the others
    M96Path path_;
    Model model_;
    int m_, context_;
    size_t layer_weights_;
    Array<bf16> weights_;
    int n_slots_;
    Array<bf16> cache_;
    Array<float> residual_, norm_;
    Array<bf16> q_, attended_, inner_;
    Array<float> logits_;
    Array<bf16> normed_rows_, qkv_, gate_up_; // more than 16 rows
    std::unique_ptr<Array<int64_t>> positions_;
    std::unique_ptr<Array<int32_t>> slots_, begin_, end_, rows_, tables_;
    std::unique_ptr<Array<float>> frequencies_;
};

} // namespace check
