// ops/cuda/row_ring.cuh against a naive twin (every use, dtype, 1 to 16 rows, odd sizes), whether a row's
// bits depend on the number of rows, whether launches stay early in a recorded graph, then times against the
// bytes of the weights.
//
//   check_row_ring [check|small|time|tune|profile]      default: check and time
#include "few_rows_input.cuh"

#include "ops/cuda/few_rows.cuh"
#include "ops/decoder_layer/cuda_uses.cuh"

#include <cstring>

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

constexpr double kReadBandwidth = 4.39e12; // of an H200, as measured

// A few values of a normalised row may round the other way: the factor is summed in another order.
template <typename T> double rounding() { return std::is_same_v<T, bf16> ? 4e-3 : 6e-4; }

template <typename T>
void check_rows(CudaStream &stream, int m, int k, int n, bool norms, bool adds, bool has_bias,
                bool wide_out) {
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
    StoreRows<T> use{};
    use.w = on_w.get();
    use.n = n;
    use.k = k;
    use.bias = {has_bias ? on_bias.get() : nullptr, LLAISYS_DTYPE_F32};
    use.out = wide_out ? Reals{out32.get(), LLAISYS_DTYPE_F32} : Reals{out16.get(), dtype_of<T>};
    use.ldo = n;
    use.adds = adds;
    use.items = items_of_unit(stream, use.count());
    std::vector<double> expected = input.times(w, n);
    for (int r = 0; r < m; ++r) {
        for (int o = 0; o < n; ++o) {
            expected[size_t(r) * n + o] += (has_bias ? double(bias[size_t(o)]) : 0.0) +
                                           (adds ? double(before[size_t(r) * n + o]) : 0.0);
        }
    }
    run_row_ring<T>(stream, input.few(0, m), use);
    const Distance found =
        wide_out ? distance(out32.host(), expected) : distance(out16.host(), expected);
    const double limit = wide_out && !norms ? 2e-5 : rounding<T>();
    report(found.within(limit, 20 * limit),
           line("row_ring %s m %d k %d n %d%s%s%s out %s: relative %.2e, largest %.2e",
                name_of<T>(), m, k, n, norms ? " norm" : "", adds ? " adds" : "",
                has_bias ? " bias" : "", wide_out ? "f32" : name_of<T>(), found.relative,
                found.largest));

    // Each row alone has the same bits.
    if (wide_out && !adds) {
        const std::vector<float> together = out32.host();
        bool are_equal = true;
        for (int r = 0; r < m; ++r) {
            out32.poison();
            run_row_ring<T>(stream, input.few(r, 1), use);
            const std::vector<float> alone = out32.host();
            are_equal = are_equal && std::memcmp(alone.data(), together.data() + size_t(r) * n,
                                                 size_t(n) * 4) == 0;
        }
        report(are_equal, line("row_ring %s m %d k %d n %d%s: each row alone has the same bits",
                               name_of<T>(), m, k, n, norms ? " norm" : ""));
    }
}

template <typename T> void check_swiglu(CudaStream &stream, int m, int k, int n) {
    const Input<T> input(m, k, true, unsigned(m + k + n));
    const auto gate = normal<T>(size_t(n) * k, 8, 1.0f / std::sqrt(float(k)));
    const auto up = normal<T>(size_t(n) * k, 9, 1.0f / std::sqrt(float(k)));
    const Array<T> on_gate(gate), on_up(up);
    Array<T> out(size_t(m) * n);
    out.poison();
    SwigluUse<T> use{on_gate.get(), on_up.get(), n, k, out.get(), n, 0};
    use.items = items_of_unit(stream, use.count());
    run_row_ring<T>(stream, input.few(0, m), use);
    std::vector<double> expected = input.times(gate, n);
    const std::vector<double> by = input.times(up, n);
    for (size_t i = 0; i < expected.size(); ++i) {
        expected[i] = by[i] * expected[i] / (1.0 + std::exp(-expected[i]));
    }
    const Distance found = distance(out.host(), expected);
    report(found.within(rounding<T>(), 20 * rounding<T>()),
           line("swiglu %s m %d k %d n %d: relative %.2e, largest %.2e", name_of<T>(), m, k, n,
                found.relative, found.largest));
}

template <typename T>
void check_qkv(CudaStream &stream, int m, int k, int heads, int kv_heads, int d) {
    const Input<T> input(m, k, true, unsigned(m + k + heads));
    const int n = (heads + 2 * kv_heads) * d;
    const int n_slots = 2 * m + 1;
    const auto w = normal<T>(size_t(n) * k, 10, 1.0f / std::sqrt(float(k)));
    const auto bias = normal<float>(size_t(n), 11);
    std::vector<int64_t> positions(static_cast<size_t>(m));
    std::vector<int32_t> slots(static_cast<size_t>(m));
    std::vector<float> frequencies(static_cast<size_t>(d / 2));
    for (int r = 0; r < m; ++r) {
        positions[size_t(r)] = r * 977 + 3;
        slots[size_t(r)] = r == 1 ? -1 : 2 * r; // row 1 only fills up
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
    LLAISYS_CUDA(cudaMemset(keys.get(), 0, keys.size() * sizeof(T)));
    LLAISYS_CUDA(cudaMemset(values.get(), 0, values.size() * sizeof(T)));
    QkvUse<T> use{};
    use.pairs.s = {heads,          kv_heads, d, {}, on_positions.get(), on_frequencies.get(),
                   on_slots.get(), n_slots};
    const int firsts[3] = {0, heads * d, (heads + kv_heads) * d};
    for (int s = 0; s < 3; ++s) {
        use.pairs.s.biases[s] = {on_bias.get() + firsts[s], LLAISYS_DTYPE_F32};
        use.w[s] = on_w.get() + size_t(firsts[s]) * k;
    }
    use.pairs.q = q.get();
    use.pairs.q_row = heads * d;
    use.pairs.k_cache = keys.get();
    use.pairs.v_cache = values.get();
    use.k = k;
    use.items = items_of_unit(stream, use.count());
    run_row_ring<T>(stream, input.few(0, m), use);

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
           line("qkv %s m %d k %d heads %d/%d of %d: relative q %.2e, k %.2e, v %.2e", name_of<T>(),
                m, k, heads, kv_heads, d, of_q.relative, of_k.relative, of_v.relative));
}

template <typename T> void check_all(CudaStream &stream) {
    for (const int m : {1, 2, 3, 5, 8, 9, 16}) {
        for (const auto &[k, n] : {std::pair(8, 9), std::pair(64, 31), std::pair(520, 33),
                                   std::pair(1032, 100), std::pair(1536, 257)}) {
            check_rows<T>(stream, m, k, n, false, false, true, true);
            check_rows<T>(stream, m, k, n, true, false, false, true);
            check_rows<T>(stream, m, k, n, false, true, false, true);
            check_rows<T>(stream, m, k, n, false, false, false, false);
        }
        check_rows<T>(stream, m, 8960, 1536, false, true, false, true);
        check_rows<T>(stream, m, 3584, 333, true, false, false, true);
        check_rows<T>(stream, m, 256, 40001, true, false, false, true); // many units a block
        check_swiglu<T>(stream, m, 1536, 301);
        check_swiglu<T>(stream, m, 2056, 2000);
        check_qkv<T>(stream, m, 1536, 12, 2, 128);
        check_qkv<T>(stream, m, 264, 7, 1, 64);
    }
}

// Edges of a recorded chain that let the next kernel in early.
void check_early_launches(CudaStream &stream) {
    constexpr int kChain = 4;
    const Input<bf16> input(1, 1536, false, 1);
    Array<bf16> w(size_t(1536) * 1536);
    fill(w.get(), w.size(), 3);
    Array<float> out(1536);
    StoreRows<bf16> use{};
    use.w = w.get();
    use.n = use.k = use.ldo = 1536;
    use.bias = {nullptr, LLAISYS_DTYPE_F32};
    use.out = {out.get(), LLAISYS_DTYPE_F32};
    use.items = items_of_unit(stream, use.count());
    cudaGraph_t graph = nullptr;
    LLAISYS_CUDA(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kChain; ++i) {
        run_row_ring<bf16>(stream, input.few(0, 1), use);
    }
    LLAISYS_CUDA(cudaStreamEndCapture(stream.stream, &graph));
    size_t n = 0;
    LLAISYS_CUDA(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &n));
    std::vector<cudaGraphNode_t> from(n), to(n);
    std::vector<cudaGraphEdgeData> data(n);
    LLAISYS_CUDA(cudaGraphGetEdges(graph, from.data(), to.data(), data.data(), &n));
    size_t early = 0;
    for (const cudaGraphEdgeData &edge : data) {
        early += edge.type == cudaGraphDependencyTypeProgrammatic ? 1 : 0;
    }
    cudaGraphDestroy(graph);
    report(n == kChain - 1 && early == n,
           line("recorded chain of %d launches: %zu edges, %zu of them early", kChain, n, early));
}

struct Shape {
    const char *name;
    int n, k;
    bool norms, adds, is_pair; // pair: gate and up
};

constexpr Shape kShapes[] = {
    {"1.5B qkv", 2048, 1536, true, false, false},    {"1.5B o", 1536, 1536, false, true, false},
    {"1.5B gate/up", 8960, 1536, true, false, true}, {"1.5B down", 1536, 8960, false, true, false},
    {"1.5B head", 151936, 1536, true, false, false}, {"7B qkv", 4608, 3584, true, false, false},
    {"7B o", 3584, 3584, false, true, false},        {"7B gate/up", 18944, 3584, true, false, true},
    {"7B down", 3584, 18944, false, true, false},    {"7B head", 152064, 3584, true, false, false},
};

enum class Kernel { ring, skinny };

// Microseconds of one launch in a chain over weights that no cache holds.
double time_shape(CudaStream &stream, const Shape &shape, int m, Kernel kernel,
                  const RingTuning &tuning) {
    const size_t bytes = size_t(shape.n) * shape.k * 2 * (shape.is_pair ? 2 : 1);
    const int copies = int(std::max<size_t>(2, (size_t(400) << 20) / bytes));
    static Array<bf16> weights(size_t(2200) << 20); // 4.4 GB
    static bool is_filled = false;
    if (!is_filled) {
        fill(weights.get(), weights.size(), 17);
        is_filled = true;
    }
    const Input<bf16> input(m, shape.k, shape.norms, 3);
    Array<float> out32(size_t(m) * shape.n);
    Array<bf16> out16(size_t(m) * shape.n);
    LLAISYS_CUDA(cudaMemset(out32.get(), 0, out32.size() * 4));
    const bool norms = shape.norms && (kernel == Kernel::ring || m == 1);
    FewRowsInput in = input.few(0, m);
    if (!norms) {
        in.residual = nullptr;
        in.x = input.on_x.get();
        in.ldx = input.ldx;
    }
    const auto run = [&](auto use) {
        use.items = items_of_unit(stream, use.count());
        kernel == Kernel::ring ? run_row_ring<bf16>(stream, in, use, tuning)
                               : run_skinny<bf16>(stream, in, use);
    };
    return time_of(stream, std::max(copies, 20), [&](int i) {
        const bf16 *w = weights.get() + size_t(i % copies) * (bytes / 2);
        if (shape.is_pair) {
            run(SwigluUse<bf16>{w, w + size_t(shape.n) * shape.k, shape.n, shape.k, out16.get(),
                                shape.n, 0});
        } else {
            StoreRows<bf16> use{};
            use.w = w;
            use.n = use.ldo = shape.n;
            use.k = shape.k;
            use.bias = {nullptr, LLAISYS_DTYPE_F32};
            use.out = {out32.get(), LLAISYS_DTYPE_F32};
            use.adds = shape.adds;
            run(use);
        }
    });
}

double floor_of(const Shape &shape) {
    return 1e6 * double(shape.n) * shape.k * 2 * (shape.is_pair ? 2 : 1) / kReadBandwidth;
}

void time_all(CudaStream &stream) {
    std::printf(
        "\nmicroseconds in a recorded chain (percent of the floor: bytes over 4.39 TB/s)\n");
    std::printf(
        "%-14s %8s  ring m=1       4              8              16            skinny m=1     8\n",
        "shape", "floor");
    for (const Shape &shape : kShapes) {
        const double floor = floor_of(shape);
        std::printf("%-14s %8.2f", shape.name, floor);
        for (const int m : {1, 4, 8, 16}) {
            const double us = time_shape(stream, shape, m, Kernel::ring, {});
            std::printf("  %7.2f (%2.0f%%)", us, 100 * floor / us);
        }
        for (const int m : {1, 8}) { // without the norm at 8 rows
            const double us = time_shape(stream, shape, m, Kernel::skinny, {});
            std::printf("  %7.2f (%2.0f%%)", us, 100 * floor / us);
        }
        std::printf("\n");
        std::fflush(stdout);
    }
}

void tune(CudaStream &stream) {
    struct Choice {
        int block, early; // KB, KB before the input
    };
    constexpr Choice kChoices[] = {{113, 18}, {113, 36}, {113, 72}, {75, 36}, {150, 36}, {220, 36}};
    for (const int m : {1, 8}) {
        std::printf("\nrow_ring m=%d, microseconds by KB a block / before the input\n%-14s", m,
                    "shape");
        for (const Choice &c : kChoices) {
            std::printf(" %5d/%2d", c.block, c.early);
        }
        std::printf("\n");
        for (const Shape &shape : kShapes) {
            std::printf("%-14s", shape.name);
            for (const Choice &c : kChoices) {
                RingTuning tuning;
                tuning.block_bytes = size_t(c.block) * 1000;
                tuning.early_bytes = size_t(c.early) * 1000;
                std::printf(" %8.2f", time_shape(stream, shape, m, Kernel::ring, tuning));
            }
            std::printf("\n");
            std::fflush(stdout);
        }
    }
}

} // namespace

int main(int argc, char **argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    try {
        CudaStream stream(0);
        if (what.empty() || what == "check") {
            check_early_launches(stream);
            check_all<bf16>(stream);
            check_all<f16>(stream);
            std::printf("row_ring: %d failed\n", failures());
        }
        if (what.empty() || what == "time") {
            time_all(stream);
        }
        if (what == "small") { // under a sanitizer
            check_rows<bf16>(stream, 3, 520, 33, false, true, true, true);
            check_rows<f16>(stream, 8, 1032, 100, true, false, false, true);
            check_swiglu<bf16>(stream, 2, 264, 301);
            check_qkv<bf16>(stream, 5, 264, 7, 1, 64);
        }
        if (what == "tune") {
            tune(stream);
        }
        if (what == "profile") { // one launch each, plainly
            for (const Shape &shape : kShapes) {
                time_shape(stream, shape, 1, Kernel::ring, {});
            }
        }
    } catch (const std::exception &error) {
        report(false, error.what());
    }
    return failures() > 0 ? 1 : 0;
}
