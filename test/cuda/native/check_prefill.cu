// ops/cuda/wgmma.cuh by itself (does a descriptor mean what its comment says), ops/attention's prefill
// kernels against a naive twin over block tables, windows, groups and both dtypes, whether a token's bits
// depend on its run, then times against the operations of the tensor cores.
//
//   check_prefill [check|small|time|profile]      default: check and time
#include "common.cuh"

#include "ops/attention/cuda_prefill.cuh"
#include "ops/attention/cuda_prefill_wgmma.cuh"

#include <cstring>

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

constexpr double kPeak = 793e12; // bf16 operations a second of an H200, as measured

// One warpgroup: along[64, 128] = a[64, 64] * b[128, 64]^T and down[64, 128] = p[64, 128] * v[128, 128].
// exchanged: the two distances of the descriptor of v the other way round.
template <typename T>
__global__ void __launch_bounds__(128, 1)
    products_kernel(const T *a, const T *b, const T *p, const T *v, float *along, float *down,
                    int exchanged) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char dynamic[];
    unsigned char *shared = dynamic + ((0u - shared_address(dynamic)) & 1023u);
    unsigned char *of_b = shared + 64 * 128;
    unsigned char *of_v = of_b + 128 * 128;
    const int t = threadIdx.x;
    const int lane = t % 32;
    const int warp = t / 32;
    const auto put = [&](unsigned char *to, const T *from, int rows, int columns) {
        for (int c = t; c < rows * columns / 8; c += 128) {
            const int row = c / (columns / 8);
            const int chunk = c % (columns / 8);
            *reinterpret_cast<uint4 *>(to + chunk / 8 * (rows * 128) + swizzled(row, chunk % 8)) =
                *reinterpret_cast<const uint4 *>(from + row * columns + chunk * 8);
        }
    };
    put(shared, a, 64, 64);
    put(of_b, b, 128, 64);
    put(of_v, v, 128, 128);
    show_to_products();
    __syncthreads();
    float s[64] = {};
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        Wgmma<T>::along(s, descriptor_along(shared_address(shared) + step * 32),
                        descriptor_along(shared_address(of_b) + step * 32), step > 0);
    }
    products_end_group();
    products_wait<0>();
    settle(s);
    float d[64] = {};
    uint32_t weights[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int row = warp * 16 + lane / 4 + (i & 1) * 8;
        const int column = i / 4 * 16 + (i >> 1 & 1) * 8 + lane % 4 * 2;
        weights[i] = *reinterpret_cast<const uint32_t *>(p + row * 128 + column);
    }
    products_begin();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
        const uint32_t at = shared_address(of_v) + step * 16 * 128;
        Wgmma<T>::down(d, weights + 4 * step,
                       exchanged ? descriptor(at, 1024, 128 * 128)
                                 : descriptor_down(at, 128 * 128));
    }
    products_end_group();
    products_wait<0>();
    settle(d);
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int row = warp * 16 + lane / 4 + (i >> 1 & 1) * 8;
        const int column = i / 4 * 8 + lane % 4 * 2 + (i & 1);
        along[row * 128 + column] = s[i];
        down[row * 128 + column] = d[i];
    }
#endif
}

template <typename T> void check_products(CudaStream &stream) {
    const auto a = normal<T>(64 * 64, 1), b = normal<T>(128 * 64, 2), p = normal<T>(64 * 128, 3),
               v = normal<T>(128 * 128, 4);
    const Array<T> on_a(a), on_b(b), on_p(p), on_v(v);
    Array<float> along(64 * 128), down(64 * 128);
    std::vector<double> want_along(64 * 128), want_down(64 * 128);
    for (int r = 0; r < 64; ++r) {
        for (int c = 0; c < 128; ++c) {
            for (int i = 0; i < 64; ++i) {
                want_along[size_t(r * 128 + c)] +=
                    double(host_float(a[size_t(r * 64 + i)])) * host_float(b[size_t(c * 64 + i)]);
            }
            for (int i = 0; i < 128; ++i) {
                want_down[size_t(r * 128 + c)] +=
                    double(host_float(p[size_t(r * 128 + i)])) * host_float(v[size_t(i * 128 + c)]);
            }
        }
    }
    constexpr size_t kBytes = 1024 + 64 * 128 + 128 * 128 + 2 * 128 * 128;
    allow_shared(products_kernel<T>, kBytes);
    for (const int exchanged : {0, 1}) {
        along.poison();
        down.poison();
        launch(stream, products_kernel<T>, 1, 128, kBytes, false, on_a.get(), on_b.get(),
               on_p.get(), on_v.get(), along.get(), down.get(), exchanged);
        const Distance of_along = distance(along.host(), want_along);
        const Distance of_down = distance(down.host(), want_down);
        if (exchanged == 0) {
            report(of_along.within(1e-5, 1e-4), line("wgmma %s, k along the rows: relative %.2e",
                                                     name_of<T>(), of_along.relative));
            report(of_down.within(1e-5, 1e-4), line("wgmma %s, k down the rows: relative %.2e",
                                                    name_of<T>(), of_down.relative));
        } else {
            std::printf(
                "note wgmma %s, k down the rows, distances exchanged: relative %.2e (large is "
                "right)\n",
                name_of<T>(), of_down.relative);
        }
    }
}

// A block for each token and head; the scores of up to kMostKeys entries in shared memory.
constexpr int kMostKeys = 10000;
template <typename T> __global__ void naive_kernel(AttentionArgs args, int d, float *out) {
    extern __shared__ float scores[];
    __shared__ float top, total;
    const int token = blockIdx.x, head = blockIdx.y;
    const int begin = args.begin[token], end = args.end[token];
    const int32_t *table = args.table_of(token);
    const T *q = static_cast<const T *>(args.q) + token * args.q_token + head * args.q_head;
    const int kv_head = head / args.group;
    for (int e = begin + int(threadIdx.x); e < end; e += blockDim.x) {
        const T *k =
            static_cast<const T *>(args.k) + (args.slot_of(table, e) * args.kv_heads + kv_head) * d;
        float sum = 0;
        for (int i = 0; i < d; ++i) {
            sum += to_float(q[i]) * to_float(k[i]);
        }
        scores[e - begin] = sum * args.scale_log2;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        top = -INFINITY;
        total = 0;
        for (int e = 0; e < end - begin; ++e) {
            top = fmaxf(top, scores[e]);
        }
        for (int e = 0; e < end - begin; ++e) {
            scores[e] = exp2f(scores[e] - top);
            total += scores[e];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float sum = 0;
        for (int e = begin; e < end; ++e) {
            const T *v = static_cast<const T *>(args.v) +
                         (args.slot_of(table, e) * args.kv_heads + kv_head) * d;
            sum += scores[e - begin] * to_float(v[i]);
        }
        out[(int64_t(token) * gridDim.y + head) * d + i] = end > begin ? sum / total : 0.0f;
    }
}

// Lists of `lengths` entries whose last `fresh` tokens ask.
struct Case {
    std::vector<int> lengths;
    int fresh, heads, kv_heads, d, block, window;
};

// On wgmma, with boxes of 16 entries or row by row, or on mma.sync.
enum class Way { kPages, kRows, kMma };
constexpr std::pair<Way, const char *> kWays[] = {
    {Way::kPages, "wgmma"}, {Way::kRows, "by rows"}, {Way::kMma, "mma.sync"}};

template <typename T> struct Problem {
    std::vector<int32_t> rows, begin, end, tables, runs;
    int longest = 0, width = 0;
    std::unique_ptr<Array<T>> q, k, v, out;
    std::unique_ptr<Array<int32_t>> on_rows, on_begin, on_end, on_tables, on_runs;
    AttentionArgs args{};
    int64_t n_slots = 0;
    int d;

    // run_tokens: runs are cut after so many tokens.
    Problem(const Case &c, int run_tokens) : d(c.d) {
        int blocks = 3;
        for (const int length : c.lengths) {
            blocks += (length + c.block - 1) / c.block;
            width = std::max(width, (length + c.block - 1) / c.block);
        }
        std::vector<int32_t> order(static_cast<size_t>(blocks));
        for (int i = 0; i < blocks; ++i) {
            order[size_t(i)] = i;
        }
        std::shuffle(order.begin(), order.end(), std::mt19937(9));
        tables.assign(c.lengths.size() * size_t(width), 0);
        size_t used = 0;
        for (size_t row = 0; row < c.lengths.size(); ++row) {
            const int length = c.lengths[row];
            for (int i = 0; i < (length + c.block - 1) / c.block; ++i) {
                tables[row * size_t(width) + size_t(i)] = order[used++];
            }
            const int first = std::max(0, length - c.fresh);
            for (int from = first; from < length; from += run_tokens) {
                const int count = std::min(run_tokens, length - from);
                runs.push_back(int32_t(rows.size()));
                runs.push_back(count);
                longest = std::max(longest, count);
                for (int at = from; at < from + count; ++at) {
                    rows.push_back(int32_t(row));
                    end.push_back(at + 1);
                    begin.push_back(c.window > 0 ? std::max(0, at + 1 - c.window) : 0);
                }
            }
        }
        const size_t n = rows.size();
        const size_t cache = size_t(blocks) * size_t(c.block) * size_t(c.kv_heads * c.d);
        q = std::make_unique<Array<T>>(normal<T>(n * size_t(c.heads * c.d), 1));
        n_slots = int64_t(blocks) * c.block;
        auto keys = normal<T>(cache, 2), values = normal<T>(cache, 3);
        const size_t a_slot = size_t(c.kv_heads * c.d);
        for (size_t row = 0; row < c.lengths.size(); ++row) { // nothing is said of what lies behind
            for (int e = c.lengths[row]; e % c.block != 0; ++e) {
                const int at =
                    tables[row * size_t(width) + size_t(e / c.block)] * c.block + e % c.block;
                std::fill_n(keys.begin() + int64_t(size_t(at) * a_slot), a_slot,
                            host_value<T>(NAN));
                std::fill_n(values.begin() + int64_t(size_t(at) * a_slot), a_slot,
                            host_value<T>(NAN));
            }
        }
        k = std::make_unique<Array<T>>(keys);
        v = std::make_unique<Array<T>>(values);
        out = std::make_unique<Array<T>>(n * size_t(c.heads * c.d));
        on_rows = std::make_unique<Array<int32_t>>(rows);
        on_begin = std::make_unique<Array<int32_t>>(begin);
        on_end = std::make_unique<Array<int32_t>>(end);
        on_tables = std::make_unique<Array<int32_t>>(tables);
        on_runs = std::make_unique<Array<int32_t>>(runs);
        args.q = q->get();
        args.out = out->get();
        args.q_token = args.out_token = int64_t(c.heads) * c.d;
        args.q_head = args.out_head = c.d;
        args.k = k->get();
        args.v = v->get();
        args.q_rows = on_rows->get();
        args.begin = on_begin->get();
        args.end = on_end->get();
        args.tables = on_tables->get();
        args.width = width;
        args.block_size = c.block;
        args.kv_heads = c.kv_heads;
        args.group = c.heads / c.kv_heads;
        args.scale_log2 = 1.4426950408889634f / std::sqrt(float(c.d));
    }
    template <int D> void run_wgmma(CudaStream &stream, bool on_pages) const {
        const auto kernel = attention_wgmma_kernel<T, D>;
        allow_shared(kernel, size_t(wgmma_shared_bytes<D>()));
        const dim3 grid(unsigned(args.kv_heads), blocks_for(longest, kWgmmaRows / args.group),
                        unsigned(runs.size() / 2));
        launch(stream, kernel, grid, kWgmmaThreads, size_t(wgmma_shared_bytes<D>()), false, args,
               static_cast<const int32_t *>(on_runs->get()),
               on_pages ? wgmma_pages<T, D>(args, n_slots) : WgmmaPages{});
    }
    void run(CudaStream &stream, Way way) const {
        if (way != Way::kMma) {
            const bool on_pages = way == Way::kPages;
            return d == 64 ? run_wgmma<64>(stream, on_pages) : run_wgmma<128>(stream, on_pages);
        }
        const auto start = [&](auto kernel, int tile_rows, int threads, int bytes) {
            allow_shared(kernel, size_t(bytes));
            const dim3 grid(blocks_for(longest, tile_rows / args.group), unsigned(args.kv_heads),
                            unsigned(runs.size() / 2));
            launch(stream, kernel, grid, unsigned(threads), size_t(bytes), false, args,
                   static_cast<const int32_t *>(on_runs->get()));
        };
        d == 64 ? start(attention_prefill_kernel<T, 64>, kPrefillRows, kPrefillThreads,
                        prefill_shared_bytes<64>())
                : start(attention_prefill_kernel<T, 128>, kPrefillRows, kPrefillThreads,
                        prefill_shared_bytes<128>());
    }
};

template <typename T> void check_attention(CudaStream &stream, const Case &c) {
    const Problem<T> problem(c, 1 << 30);
    const size_t n = problem.rows.size();
    Array<float> expected(n * size_t(c.heads * c.d));
    const size_t bytes = kMostKeys * sizeof(float);
    allow_shared(naive_kernel<T>, bytes);
    launch(stream, naive_kernel<T>, dim3(unsigned(n), unsigned(c.heads)), 128, bytes, false,
           problem.args, c.d, expected.get());
    const std::vector<float> twin = expected.host();
    const std::vector<double> want(twin.begin(), twin.end());
    const double limit = std::is_same_v<T, bf16> ? 6e-3 : 1e-3;
    const Problem<T> cut(c, 37);
    for (const auto &[way, name] : kWays) {
        if (way == Way::kMma) {
            continue;
        }
        problem.out->poison();
        problem.run(stream, way);
        const std::vector<T> whole = problem.out->host();
        const Distance found = distance(whole, want);
        report(
            found.within(limit, 12 * limit),
            line("prefill %s %s lists %zu of %d.. fresh %d heads %d/%d of %d block %d window %d: "
                 "relative %.2e, largest %.2e",
                 name_of<T>(), name, c.lengths.size(), c.lengths[0], c.fresh, c.heads, c.kv_heads,
                 c.d, c.block, c.window, found.relative, found.largest));
        cut.out->poison();
        cut.run(stream, way);
        const std::vector<T> parts = cut.out->host();
        report(
            std::memcmp(whole.data(), parts.data(), whole.size() * sizeof(T)) == 0,
            line(
                "prefill %s %s fresh %d heads %d/%d of %d window %d: runs of 37 have the same bits",
                name_of<T>(), name, c.fresh, c.heads, c.kv_heads, c.d, c.window));
    }
}

template <typename T> void check_all(CudaStream &stream) {
    check_products<T>(stream);
    for (const Case &c :
         {Case{{2}, 2, 1, 1, 64, 1, 0}, Case{{5, 130, 17}, 9, 6, 2, 128, 16, 0},
          Case{{127, 128, 129}, 200, 12, 2, 128, 16, 0}, Case{{700}, 130, 4, 4, 64, 32, 200},
          Case{{512, 90}, 64, 28, 4, 128, 1, 0}, Case{{1031}, 1031, 7, 1, 128, 16, 0},
          Case{{1500}, 300, 16, 1, 64, 16, 333}, Case{{2500}, 400, 14, 2, 128, 16, 0},
          Case{{640}, 640, 5, 5, 64, 16, 0}}) {
        check_attention<T>(stream, c);
    }
}

void time_all(CudaStream &stream) {
    std::printf("\nprefill attention, bf16, microseconds (TFLOP/s, percent of 793)\n");
    for (const Case &c :
         {Case{{4000}, 4000, 12, 2, 128, 16, 0}, Case{{4000}, 4000, 28, 4, 128, 16, 0},
          Case{{16000}, 16000, 28, 4, 128, 16, 0}, Case{{8000}, 1000, 12, 2, 128, 16, 0},
          Case{std::vector<int>(16, 560), 560, 12, 2, 128, 16, 0},
          Case{{4000}, 4000, 14, 2, 64, 16, 0}}) {
        const Problem<bf16> problem(c, 1 << 30);
        double seen = 0;
        for (size_t i = 0; i < problem.rows.size(); ++i) {
            seen += problem.end[i] - problem.begin[i];
        }
        const double operations = seen * c.heads * c.d * 4;
        std::printf("%2zu lists of %5d, %5d fresh, heads %d/%d of %d:", c.lengths.size(),
                    c.lengths[0], c.fresh, c.heads, c.kv_heads, c.d);
        for (const auto &[way, name] : kWays) {
            const Way chosen = way;
            const double us = time_of(stream, 5, [&](int) { problem.run(stream, chosen); }, 7);
            std::printf("  %s %8.1f (%4.0f, %2.0f%%)", name, us, operations / us / 1e6,
                        100 * operations / us * 1e6 / kPeak);
            std::fflush(stdout);
        }
        std::printf("\n");
    }
}

} // namespace

int main(int argc, char **argv) {
    const auto check = [](CudaStream &stream) {
        check_all<bf16>(stream);
        check_all<f16>(stream);
        std::printf("prefill: %d failed\n", failures());
    };
    const auto small = [](CudaStream &stream) { // under a sanitizer
        check_products<bf16>(stream);
        check_attention<bf16>(stream, {{5, 130, 17}, 9, 6, 2, 128, 16, 0});
        check_attention<f16>(stream, {{300}, 40, 4, 4, 64, 32, 100});
    };
    const auto profile = [](CudaStream &stream) {
        Problem<bf16>({{4000}, 4000, 12, 2, 128, 16, 0}, 1 << 30).run(stream, Way::kPages);
        Problem<bf16>({{4000}, 4000, 28, 4, 128, 16, 0}, 1 << 30).run(stream, Way::kPages);
        LLAISYS_CUDA(cudaStreamSynchronize(stream.stream));
    };
    return run_stages(argc, argv,
                      {{"check", true, check},
                       {"small", false, small},
                       {"time", true, time_all},
                       {"profile", false, profile}});
}
