// ops/decoder_layer/cuda_rope_kv_store.cuh against a naive reference: with and without QK norm and
// biases, head_dim 32 to 256, both dtypes, padding rows; then microseconds at the shapes of models.
//
//   check_rope_kv_store [check|small|time]      default: check and time
#include "common.cuh"

#include "ops/decoder_layer/cuda_rope_kv_store.cuh"

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

constexpr float kEpsilon = 1e-6f;

struct Case {
    int n, heads, kv_heads, d;
    bool has_norm, has_bias;
};

template <typename T> void check_case(CudaStream &stream, const Case &c) {
    const int width = (c.heads + 2 * c.kv_heads) * c.d;
    const int ld = width + 8;
    const int n_slots = 2 * c.n + 1;
    const auto qkv = normal<T>(size_t(c.n) * ld, 1, 3.0f);
    const auto bias = normal<float>(size_t(width), 2);
    const auto weights = normal<float>(size_t(2 * c.d), 3);
    std::vector<int64_t> positions;
    std::vector<int32_t> slots;
    std::vector<float> frequencies;
    for (int r = 0; r < c.n; ++r) {
        positions.push_back(r * 977 + 3);
        slots.push_back(r == 1 ? -1 : 2 * r); // row 1 is padding
    }
    for (int i = 0; i < c.d / 2; ++i) {
        frequencies.push_back(std::pow(1e4f, -2.0f * float(i) / float(c.d)));
    }
    const Array<T> on_qkv(qkv);
    const Array<float> on_bias(bias), on_weights(weights), on_frequencies(frequencies);
    const Array<int64_t> on_positions(positions);
    const Array<int32_t> on_slots(slots);
    Array<T> keys(size_t(n_slots) * c.kv_heads * c.d), values(keys.size());
    keys.clear();
    values.clear();
    RopeKvStore<T> pairs{};
    pairs.s = {c.heads,        c.kv_heads, c.d, {}, on_positions.get(), on_frequencies.get(),
               on_slots.get(), n_slots};
    const int firsts[3] = {0, c.heads * c.d, (c.heads + c.kv_heads) * c.d};
    for (int s = 0; s < 3; ++s) {
        pairs.s.biases[s] = {c.has_bias ? on_bias.get() + firsts[s] : nullptr, LLAISYS_DTYPE_F32};
    }
    pairs.q = on_qkv.get();
    pairs.q_row = ld;
    pairs.k_cache = keys.get();
    pairs.v_cache = values.get();
    QkNorm norm{{nullptr, LLAISYS_DTYPE_F32}, {nullptr, LLAISYS_DTYPE_F32}, kEpsilon};
    if (c.has_norm) {
        norm.q.data = on_weights.get();
        norm.k.data = on_weights.get() + c.d;
    }
    rope_kv_store<T>(stream, pairs, norm, pairs.q, ld, c.n);

    std::vector<double> want_q(size_t(c.n) * c.heads * c.d), want_k(keys.size()),
        want_v(keys.size());
    for (int r = 0; r < c.n; ++r) {
        for (int head = 0; head < c.heads + 2 * c.kv_heads; ++head) {
            const bool is_value = head >= c.heads + c.kv_heads;
            std::vector<double> x;
            double squares = 0;
            for (int i = 0; i < c.d; ++i) {
                const int at = head * c.d + i;
                x.push_back(double(host_float(qkv[size_t(r) * ld + at])) +
                            (c.has_bias ? double(bias[size_t(at)]) : 0.0));
                squares += x.back() * x.back();
            }
            for (int i = 0; c.has_norm && !is_value && i < c.d; ++i) {
                const double weight = weights[size_t((head < c.heads ? 0 : c.d) + i)];
                x[size_t(i)] *= weight / std::sqrt(squares / c.d + double(kEpsilon));
            }
            for (int i = 0; !is_value && i < c.d / 2; ++i) {
                const double angle = double(positions[size_t(r)]) * double(frequencies[size_t(i)]);
                const double low = x[size_t(i)], high = x[size_t(i + c.d / 2)];
                x[size_t(i)] = low * std::cos(angle) - high * std::sin(angle);
                x[size_t(i + c.d / 2)] = high * std::cos(angle) + low * std::sin(angle);
            }
            std::vector<double> *to = &want_q;
            size_t at = (size_t(r) * c.heads + head) * c.d;
            if (head >= c.heads) {
                if (slots[size_t(r)] < 0) {
                    continue;
                }
                to = is_value ? &want_v : &want_k;
                at = (size_t(slots[size_t(r)]) * c.kv_heads + (head - c.heads) % c.kv_heads) * c.d;
            }
            std::copy(x.begin(), x.end(), to->begin() + ptrdiff_t(at));
        }
    }
    const auto all = on_qkv.host();
    std::vector<T> got_q;
    for (int r = 0; r < c.n; ++r) {
        got_q.insert(got_q.end(), all.begin() + size_t(r) * ld,
                     all.begin() + size_t(r) * ld + c.heads * c.d);
    }
    const Distance of_q = distance(got_q, want_q);
    const Distance of_k = distance(keys.host(), want_k);
    const Distance of_v = distance(values.host(), want_v);
    const double limit = std::is_same_v<T, bf16> ? 4e-3 : 6e-4;
    report(of_q.within(limit, 20 * limit) && of_k.within(limit, 40 * limit) &&
               of_v.within(limit, 40 * limit),
           line("rope_kv_store %s n %d heads %d/%d of %d%s%s: relative q %.2e, k %.2e, v %.2e",
                name_of<T>(), c.n, c.heads, c.kv_heads, c.d, c.has_norm ? " QK norm" : "",
                c.has_bias ? " bias" : "", of_q.relative, of_k.relative, of_v.relative));
}

template <typename T> void check_all(CudaStream &stream) {
    for (const int d : {32, 64, 128, 256}) {
        for (const bool has_norm : {true, false}) {
            for (const bool has_bias : {true, false}) {
                check_case<T>(stream, {1, 32, 8, d, has_norm, has_bias});
                check_case<T>(stream, {3, 7, 1, d, has_norm, has_bias});
                check_case<T>(stream, {37, 5, 5, d, has_norm, has_bias});
            }
        }
    }
    for (const int d : {96, 160}) { // no fused norm
        check_case<T>(stream, {3, 6, 2, d, false, true});
    }
}

void time_all(CudaStream &stream) {
    std::printf("\nbiases, QK norm, RoPE and KV store, bf16: microseconds in a captured graph "
                "(percent of the DRAM bound) with QK norm; without\n");
    constexpr int kHeads = 32, kKvHeads = 8, kD = 128, kWidth = (kHeads + 2 * kKvHeads) * kD;
    for (const int n : {1, 8, 32, 256, 4000}) {
        const Array<bf16> qkv(size_t(n) * kWidth), cache(size_t(2 * n) * kKvHeads * kD);
        fill(qkv.get(), qkv.size(), 1);
        std::vector<int32_t> slots;
        for (int i = 0; i < n; ++i) {
            slots.push_back(i);
        }
        const Array<int32_t> on_slots(slots);
        const Array<int64_t> positions(std::vector<int64_t>(size_t(n), 77));
        const Array<float> frequencies(std::vector<float>(kD / 2, 0.01f)),
            weights(std::vector<float>(kD, 1.0f));
        RopeKvStore<bf16> pairs{};
        pairs.s = {kHeads, kKvHeads, kD, {}, positions.get(), frequencies.get(), on_slots.get(), n};
        pairs.q = qkv.get();
        pairs.q_row = kWidth;
        pairs.k_cache = cache.get();
        pairs.v_cache = cache.get() + size_t(n) * kKvHeads * kD;
        std::printf("%5d rows:", n);
        for (const bool has_norm : {true, false}) {
            const Reals weight{has_norm ? weights.get() : nullptr, LLAISYS_DTYPE_F32};
            const double us = time_of(stream, 50, [&](int) {
                rope_kv_store<bf16>(stream, pairs, {weight, weight, kEpsilon}, qkv.get(), kWidth,
                                    n);
            });
            std::printf("  %7.2f (%2.0f%%)", us, 100e6 * 4.0 * n * kWidth / kReadBandwidth / us);
        }
        std::printf("\n");
        std::fflush(stdout);
    }
}

} // namespace

int main(int argc, char **argv) {
    const auto check = [](CudaStream &stream) {
        check_all<bf16>(stream);
        check_all<f16>(stream);
        std::printf("rope_kv_store: %d failed\n", failures());
    };
    const auto small = [](CudaStream &stream) { // for compute-sanitizer
        check_case<bf16>(stream, {3, 7, 1, 128, true, true});
        check_case<f16>(stream, {2, 4, 2, 64, true, false});
        check_case<bf16>(stream, {2, 4, 2, 96, false, true});
    };
    return run_stages(argc, argv,
                      {{"check", true, check}, {"small", false, small}, {"time", true, time_all}});
}
