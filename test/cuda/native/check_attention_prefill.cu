// ops/cuda/wgmma.cuh descriptors, and the prefill attention kernels against a naive reference
// over block tables, windows, groups and both dtypes; independence of a token's bits from its
// run; then times against the tensor core peak.
//
//   check_attention_prefill [check|small|time|profile]      default: check and time
#include "wgmma_reference.cuh"

#include "ops/attention/cuda_prefill.cuh"
#include "ops/attention/cuda_prefill_wgmma.cuh"

#include <cstring>

using namespace llaisys::ops::cuda;
using namespace check;

namespace {

// One block per token and head; scores of up to kMostKeys positions in shared memory.
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

// Sequences of `lengths` positions whose last `fresh` tokens are queries.
struct Case {
    std::vector<int> lengths;
    int fresh, heads, kv_heads, d, block, window;
};

// wgmma with TMA loads, wgmma with cp.async loads, or mma.sync.
enum class Path { kPages, kRows, kMma };
constexpr std::pair<Path, const char *> kWays[] = {
    {Path::kPages, "wgmma, TMA"}, {Path::kRows, "wgmma, cp.async"}, {Path::kMma, "mma.sync"}};

template <typename T> struct Problem {
    std::vector<int32_t> rows, begin, end, tables, runs;
    int longest = 0, width = 0;
    std::unique_ptr<Array<T>> q, k, v, out;
    std::unique_ptr<Array<int32_t>> on_rows, on_begin, on_end, on_tables, on_runs;
    AttentionArgs args{};
    int64_t n_slots = 0;
    int n_blocks = 0; // grid size; 0: as the operator chooses
    int d;

    // run_tokens: runs are split after this many tokens.
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
        for (size_t row = 0; row < c.lengths.size(); ++row) { // positions beyond the end hold NaN
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
        set_max_dynamic_smem(kernel, size_t(wgmma_shared_bytes<D>()));
        const auto n_runs = int64_t(runs.size() / 2);
        const int most_blocks =
            n_blocks > 0 ? n_blocks
                         : wgmma_grid_limit(n_runs, longest, int64_t(rows.size()), stream.n_sms);
        const TileScheduler items =
            tile_scheduler(args, on_runs->get(), n_runs, longest, most_blocks);
        launch(stream, kernel, unsigned(items.n_blocks), kWgmmaThreads,
               size_t(wgmma_shared_bytes<D>()), true, args, items,
               on_pages ? paged_kv_maps<T, D>(args, n_slots) : PagedKvMaps{});
    }
    void run(CudaStream &stream, Path path) const {
        if (path != Path::kMma) {
            const bool on_pages = path == Path::kPages;
            return d == 64 ? run_wgmma<64>(stream, on_pages) : run_wgmma<128>(stream, on_pages);
        }
        const auto start = [&](auto kernel, int tile_rows, int threads, int bytes) {
            set_max_dynamic_smem(kernel, size_t(bytes));
            const dim3 grid(ceil_div(longest, tile_rows / args.group), unsigned(args.kv_heads),
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
    Problem<T> problem(c, 1 << 30);
    const size_t n = problem.rows.size();
    Array<float> expected(n * size_t(c.heads * c.d));
    const size_t bytes = kMostKeys * sizeof(float);
    set_max_dynamic_smem(naive_kernel<T>, bytes);
    launch(stream, naive_kernel<T>, dim3(unsigned(n), unsigned(c.heads)), 128, bytes, false,
           problem.args, c.d, expected.get());
    const std::vector<float> reference = expected.host();
    const std::vector<double> want(reference.begin(), reference.end());
    const double limit = std::is_same_v<T, bf16> ? 6e-3 : 1e-3;
    const Problem<T> cut(c, 37);
    for (const auto &[path, name] : kWays) {
        if (path == Path::kMma) {
            continue;
        }
        problem.out->poison();
        problem.run(stream, path);
        const std::vector<T> whole = problem.out->host();
        const Distance found = distance(whole, want);
        report(found.within(limit, 12 * limit),
               line("prefill %s %s sequences %zu of %d.. fresh %d heads %d/%d of %d block %d "
                    "window %d: "
                    "relative %.2e, largest %.2e",
                    name_of<T>(), name, c.lengths.size(), c.lengths[0], c.fresh, c.heads,
                    c.kv_heads, c.d, c.block, c.window, found.relative, found.largest));
        for (const int blocks : {1, 2, 5, 1 << 20}) {
            problem.n_blocks = blocks;
            problem.out->poison();
            problem.run(stream, path);
            const std::vector<T> same = problem.out->host();
            report(std::memcmp(whole.data(), same.data(), whole.size() * sizeof(T)) == 0,
                   line("prefill %s %s fresh %d heads %d/%d of %d window %d: %d blocks, same bits",
                        name_of<T>(), name, c.fresh, c.heads, c.kv_heads, c.d, c.window, blocks));
        }
        problem.n_blocks = 0;
        cut.out->poison();
        cut.run(stream, path);
        const std::vector<T> parts = cut.out->host();
        report(
            std::memcmp(whole.data(), parts.data(), whole.size() * sizeof(T)) == 0,
            line(
                "prefill %s %s fresh %d heads %d/%d of %d window %d: runs of 37 have the same bits",
                name_of<T>(), name, c.fresh, c.heads, c.kv_heads, c.d, c.window));
    }
}

// Every work tile is assigned to exactly one block and round.
void check_scheduler() {
    bool is_right = true;
    for (int n = 1; n <= 40; ++n) {
        for (int count = 1; count <= 8 * n; ++count) {
            AttentionArgs args{};
            args.kv_heads = 1;
            args.group = kWgmmaRows; // one token per tile
            const TileScheduler items = tile_scheduler(args, nullptr, 1, count, n);
            std::vector<int> taken(size_t(items.n_rounds * items.n_blocks));
            for (int i = 0; i < items.n_rounds * items.n_blocks; ++i) {
                ++taken.at(size_t(items.work_of_block(i % items.n_blocks, i / items.n_blocks)));
            }
            is_right = is_right && *std::min_element(taken.begin(), taken.end()) == 1;
        }
    }
    report(is_right, "prefill: each work tile is scheduled once");
}

template <typename T> void check_all(CudaStream &stream) {
    check_wgmma<T>(stream);
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
          Case{{90, 1000, 300, 700, 500, 120, 880, 640, 410, 200, 960, 760, 350, 600, 150, 840},
               1000,
               12,
               2,
               128,
               16,
               0},
          Case{{2048}, 2048, 12, 2, 128, 16, 0}, Case{{2048}, 2048, 28, 4, 128, 16, 0},
          Case{{4000}, 4000, 14, 2, 64, 16, 0}}) {
        const Problem<bf16> problem(c, 1 << 30);
        double seen = 0;
        for (size_t i = 0; i < problem.rows.size(); ++i) {
            seen += problem.end[i] - problem.begin[i];
        }
        const double operations = seen * c.heads * c.d * 4;
        std::printf("%2zu sequences of %5d, %5d fresh, heads %d/%d of %d:", c.lengths.size(),
                    c.lengths[0], c.fresh, c.heads, c.kv_heads, c.d);
        for (const auto &[path, name] : kWays) {
            const Path chosen = path;
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
        check_scheduler();
        check_all<bf16>(stream);
        check_all<f16>(stream);
        std::printf("attention_prefill: %d failed\n", failures());
    };
    const auto small = [](CudaStream &stream) { // for compute-sanitizer
        check_wgmma<bf16>(stream);
        check_attention<bf16>(stream, {{5, 130, 17}, 9, 6, 2, 128, 16, 0});
        check_attention<f16>(stream, {{300}, 40, 4, 4, 64, 32, 100});
    };
    const auto profile = [](CudaStream &stream) {
        Problem<bf16>({{4000}, 4000, 12, 2, 128, 16, 0}, 1 << 30).run(stream, Path::kPages);
        Problem<bf16>({{4000}, 4000, 28, 4, 128, 16, 0}, 1 << 30).run(stream, Path::kPages);
        LLAISYS_CUDA(cudaStreamSynchronize(stream.stream));
    };
    return run_stages(argc, argv,
                      {{"check", true, check},
                       {"small", false, small},
                       {"time", true, time_all},
                       {"profile", false, profile}});
}
