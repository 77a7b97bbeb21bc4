// Small-M GEMMs against a naive reference, for every epilogue. The program passes the kernel:
//
//   run(stream, in, epilogue)      sets epilogue.items
#pragma once

#include "gemm_small_m_input.cuh"

#include "ops/decoder_layer/cuda_epilogues.cuh"

#include <cstring>

namespace check {

using namespace llaisys::ops::cuda;

// The norm factor is summed in another order, so a few values may round differently.
template <typename T> double rounding() { return std::is_same_v<T, bf16> ? 4e-3 : 6e-4; }

template <typename T, typename Run>
void check_rows(CudaStream &stream, const char *kernel, const Run &run, int m, int k, int n,
                bool norms, bool adds, bool has_bias, bool wide_out) {
    const Input<T> input(m, k, norms, unsigned(m * 7919 + k * 31 + n));
    const auto w = normal<T>(size_t(n) * k, 5, 1.0f / std::sqrt(float(k)));
    const auto bias = normal<float>(size_t(n), 6);
    const auto before = normal<float>(size_t(m) * n, 7);
    const Array<T> on_w(w);
    const Array<float> on_bias(bias);
    Array<float> out32(before);
    Array<T> out16(size_t(m) * n);
    out16.poison();
    if (!adds) {
        out32.poison();
    }
    LinearEpilogue<T> epilogue{};
    epilogue.w = on_w.get();
    epilogue.n = n;
    epilogue.k = k;
    epilogue.bias = {has_bias ? on_bias.get() : nullptr, LLAISYS_DTYPE_F32};
    epilogue.out =
        wide_out ? Reals{out32.get(), LLAISYS_DTYPE_F32} : Reals{out16.get(), dtype_of<T>};
    epilogue.ldo = n;
    epilogue.adds = adds;
    std::vector<double> expected = input.times(w, n);
    for (int r = 0; r < m; ++r) {
        for (int o = 0; o < n; ++o) {
            expected[size_t(r) * n + o] += (has_bias ? double(bias[size_t(o)]) : 0.0) +
                                           (adds ? double(before[size_t(r) * n + o]) : 0.0);
        }
    }
    run(stream, input.few(0, m), epilogue);
    const Distance found =
        wide_out ? distance(out32.host(), expected) : distance(out16.host(), expected);
    const double limit = wide_out && !norms ? 2e-5 : rounding<T>();
    report(found.within(limit, 20 * limit),
           line("%s %s m %d k %d n %d%s%s%s out %s: relative %.2e, largest %.2e", kernel,
                name_of<T>(), m, k, n, norms ? " norm" : "", adds ? " adds" : "",
                has_bias ? " bias" : "", wide_out ? "f32" : name_of<T>(), found.relative,
                found.largest));

    // Each row alone has the same bits.
    if (wide_out && !adds) {
        const std::vector<float> together = out32.host();
        bool are_equal = true;
        for (int r = 0; r < m; ++r) {
            out32.poison();
            run(stream, input.few(r, 1), epilogue);
            const std::vector<float> alone = out32.host();
            are_equal = are_equal && std::memcmp(alone.data(), together.data() + size_t(r) * n,
                                                 size_t(n) * 4) == 0;
        }
        report(are_equal, line("%s %s m %d k %d n %d%s: each row alone has the same bits", kernel,
                               name_of<T>(), m, k, n, norms ? " norm" : ""));
    }
}

template <typename T, typename Run>
void check_swiglu(CudaStream &stream, const char *kernel, const Run &run, int m, int k, int n,
                  bool norms = true) {
    const Input<T> input(m, k, norms, unsigned(m + k + n));
    const auto gate = normal<T>(size_t(n) * k, 8, 1.0f / std::sqrt(float(k)));
    const auto up = normal<T>(size_t(n) * k, 9, 1.0f / std::sqrt(float(k)));
    std::vector<T> both = gate;
    both.insert(both.end(), up.begin(), up.end());
    const Array<T> on_both(both);
    Array<T> out(size_t(m) * n);
    out.poison();
    SwigluEpilogue<T> epilogue{on_both.get(), on_both.get() + gate.size(), n, k, out.get(), n, 0};
    run(stream, input.few(0, m), epilogue);
    std::vector<double> expected = input.times(gate, n);
    const std::vector<double> by = input.times(up, n);
    for (size_t i = 0; i < expected.size(); ++i) {
        expected[i] = by[i] * expected[i] / (1.0 + std::exp(-expected[i]));
    }
    const Distance found = distance(out.host(), expected);
    report(found.within(rounding<T>(), 20 * rounding<T>()),
           line("%s swiglu %s m %d k %d n %d: relative %.2e, largest %.2e", kernel, name_of<T>(), m,
                k, n, found.relative, found.largest));
}

template <typename T, typename Run>
void check_qkv(CudaStream &stream, const char *kernel, const Run &run, int m, int k, int heads,
               int kv_heads, int d, bool norms = true) {
    const Input<T> input(m, k, norms, unsigned(m + k + heads));
    const int n = (heads + 2 * kv_heads) * d;
    const int n_slots = 2 * m + 1;
    const auto w = normal<T>(size_t(n) * k, 10, 1.0f / std::sqrt(float(k)));
    const auto bias = normal<float>(size_t(n), 11);
    std::vector<int64_t> positions(static_cast<size_t>(m));
    std::vector<int32_t> slots(static_cast<size_t>(m));
    std::vector<float> frequencies(static_cast<size_t>(d / 2));
    for (int r = 0; r < m; ++r) {
        positions[size_t(r)] = r * 977 + 3;
        slots[size_t(r)] = r == 1 ? -1 : 2 * r; // row 1 is padding
    }
    for (int i = 0; i < d / 2; ++i) {
        frequencies[size_t(i)] = std::pow(1e4f, -2.0f * float(i) / float(d));
    }
    const Array<T> on_w(w);
    const Array<float> on_bias(bias), on_frequencies(frequencies);
    const Array<int64_t> on_positions(positions);
    const Array<int32_t> on_slots(slots);
    Array<T> q(size_t(m) * heads * d), keys(size_t(n_slots) * kv_heads * d),
        values(size_t(n_slots) * kv_heads * d);
    q.poison();
    keys.clear();
    values.clear();
    QkvEpilogue<T> epilogue{};
    epilogue.pairs.s = {heads,          kv_heads, d, {}, on_positions.get(), on_frequencies.get(),
                        on_slots.get(), n_slots};
    const int firsts[3] = {0, heads * d, (heads + kv_heads) * d};
    for (int s = 0; s < 3; ++s) {
        epilogue.pairs.s.biases[s] = {on_bias.get() + firsts[s], LLAISYS_DTYPE_F32};
        epilogue.w[s] = on_w.get() + size_t(firsts[s]) * k;
    }
    epilogue.pairs.q = q.get();
    epilogue.pairs.q_row = heads * d;
    epilogue.pairs.k_cache = keys.get();
    epilogue.pairs.v_cache = values.get();
    epilogue.k = k;
    run(stream, input.few(0, m), epilogue);

    const std::vector<double> sums = input.times(w, n);
    std::vector<double> want_q(q.size()), want_k(keys.size()), want_v(values.size());
    for (int r = 0; r < m; ++r) {
        for (int head = 0; head < heads + 2 * kv_heads; ++head) {
            for (int i = 0; i < d / 2; ++i) {
                const size_t at = size_t(head) * d + i;
                double low = sums[size_t(r) * n + at] + bias[at];
                double high = sums[size_t(r) * n + at + d / 2] + bias[at + d / 2];
                if (head < heads + kv_heads) {
                    const double angle =
                        double(positions[size_t(r)]) * double(frequencies[size_t(i)]);
                    const double turned = low * std::cos(angle) - high * std::sin(angle);
                    high = high * std::cos(angle) + low * std::sin(angle);
                    low = turned;
                }
                std::vector<double> *to = &want_q;
                size_t place = (size_t(r) * heads + head) * d + i;
                if (head >= heads) {
                    const int own = (head - heads) % kv_heads;
                    to = head < heads + kv_heads ? &want_k : &want_v;
                    if (slots[size_t(r)] < 0) {
                        continue;
                    }
                    place = (size_t(slots[size_t(r)]) * kv_heads + own) * d + i;
                }
                (*to)[place] = low;
                (*to)[place + d / 2] = high;
            }
        }
    }
    const Distance of_q = distance(q.host(), want_q);
    const Distance of_k = distance(keys.host(), want_k);
    const Distance of_v = distance(values.host(), want_v);
    const double limit = rounding<T>();
    report(of_q.within(limit, 20 * limit) && of_k.within(limit, 40 * limit) &&
               of_v.within(limit, 40 * limit),
           line("%s qkv %s m %d k %d heads %d/%d of %d: relative q %.2e, k %.2e, v %.2e", kernel,
                name_of<T>(), m, k, heads, kv_heads, d, of_q.relative, of_k.relative,
                of_v.relative));
}

} // namespace check
