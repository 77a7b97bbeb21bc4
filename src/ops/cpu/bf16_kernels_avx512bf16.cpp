// Products with bf16 weights by dot products of pairs (VDPBF16PS): twice the rate of f32. An output
// adds pair after pair along k for every row count, so results do not depend on the batch.
//
// Bound: the bandwidth of the weights for few rows, dot products for more: two vectors of 16 outputs
// per cycle and pair of values. A K block of a panel streams from L2, the rows of its register tile
// stay in L1; sums stay in memory between blocks.
#define LLAISYS_CPU_NS cpu_avx512bf16
#include "device/cpu/simd_avx512.hpp"

#include "ops/cpu/bf16_rows.hpp"
#include "ops/cpu/linear_kernel.hpp"
#include "ops/cpu/pair_tile.hpp"

namespace llaisys::LLAISYS_CPU_NS {

namespace {

using ops::cpu::kTaskPanels;
using ops::cpu::kTileTaskRows;
using ops::cpu::TileTask;

constexpr int kHeight = 8;           // rows of a register tile
constexpr int64_t kRowBlock = 16;    // rows of a block of TileRows
constexpr int64_t kPairBlockK = 256; // K block for more than one register tile
constexpr int64_t kPairBytes = 2 * kPanel * int64_t(sizeof(bf16_t)); // two values of k of a panel
constexpr int64_t kRowBytes = kTileK * int64_t(sizeof(bf16_t));
constexpr int64_t kStepBytes = kTileK / 2 * kPairBytes;

// acc [rows, 32] += rows from x on, n values of k, times a panel from w on. x: at this k; its next
// kTileK values are x_step further. is_first: acc is uninitialised.
template <int rows, typename Fetch>
void pair_tile(const bf16_t *x, int64_t x_step, int64_t n, const char *w, bool is_first, float *acc,
               Fetch &fetch) {
    vf low[rows];
    vf high[rows];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        low[r] = is_first ? zero() : load(acc + r * kPanel);
        high[r] = is_first ? zero() : load(acc + r * kPanel + 16);
    }
    for (; n > 0; n -= kTileK, x += x_step) {
        fetch.step();
        const char *pair = reinterpret_cast<const char *>(x);
        for (const char *end = pair + kRowBytes; pair < end; pair += 16, w += 4 * kPairBytes) {
            add_pair(low, high, pair, kRowBytes, w);
            add_pair(low, high, pair + 4, kRowBytes, w + kPairBytes);
            add_pair(low, high, pair + 8, kRowBytes, w + 2 * kPairBytes);
            add_pair(low, high, pair + 12, kRowBytes, w + 3 * kPairBytes);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
        store(acc + r * kPanel, low[r]);
        store(acc + r * kPanel + 16, high[r]);
    }
}

// The same for m <= kHeight rows.
template <int rows = kHeight, typename Fetch>
inline void pair_rows(int64_t m, const bf16_t *x, int64_t x_step, int64_t n, const char *w,
                      bool is_first, float *acc, Fetch &fetch) {
    if constexpr (rows > 1) {
        if (m < rows) {
            return pair_rows<rows - 1>(m, x, x_step, n, w, is_first, acc, fetch);
        }
    }
    pair_tile<rows>(x, x_step, n, w, is_first, acc, fetch);
}

// acc [m, 32] += all rows of the task, n values from k on, times a panel from w on.
template <typename Fetch>
void multiply_pairs(const TileTask &task, int64_t k, int64_t n, const char *w, float *acc,
                    Fetch fetch) {
    for (int64_t block = 0; block < task.out.m; block += kRowBlock) {
        const int64_t rows = smaller(task.out.m - block, kRowBlock);
        const int64_t height = rows > kHeight ? (rows + 1) / 2 : rows;
        const bf16_t *x = task.x.tile(block, k);
        for (int64_t r = 0; r < rows; r += height) {
            pair_rows(smaller(rows - r, height), x + r * kTileK, task.x.height * kTileK, n, w,
                      k == 0, acc + (block + r) * kPanel, fetch);
        }
    }
}

// One register tile: the weights are a stream.
void stream_panels(const TileTask &task, int64_t panels, const char *w, float *acc) {
    for (int64_t p = 0; p < panels; ++p, w += task.x.k / 2 * kPairBytes) {
        multiply_pairs(task, 0, task.x.k, w, acc + p * task.out.m * kPanel,
                       NearFetch<int(kStepBytes / 64)>{w + kStreamBytes});
    }
}

// More rows: K block after K block of all panels; the next block of weights is prefetched.
void block_panels(const TileTask &task, int64_t panels, const char *weights, float *acc) {
    const int64_t k_all = task.x.k;
    const int64_t panel_bytes = k_all / 2 * kPairBytes;
    const int64_t tiles = (task.out.m + kHeight - 1) / kHeight; // of the rows
    for (int64_t k = 0; k < k_all; k += kPairBlockK) {
        const int64_t n = smaller(k_all - k, kPairBlockK);
        for (int64_t p = 0; p < panels; ++p) {
            const char *w = weights + p * panel_bytes + k / 2 * kPairBytes;
            const char *next =
                p + 1 < panels ? w + panel_bytes : weights + (k + n) % k_all / 2 * kPairBytes;
            multiply_pairs(
                task, k, n, w, acc + p * task.out.m * kPanel,
                FarFetch{next, next + n / 2 * kPairBytes, next, (kStepBytes + tiles - 1) / tiles});
        }
    }
}

void linear_pairs(const TileTask &task) {
    alignas(64) float acc[kTaskPanels * kTileTaskRows * kPanel];
    const int64_t panels = (task.out.n + kPanel - 1) / kPanel;
    const int64_t panel_bytes = task.x.k / 2 * kPairBytes;
    const char *w = static_cast<const char *>(task.out.w);
    for (int64_t first = 0; first < panels; first += kTaskPanels, w += kTaskPanels * panel_bytes) {
        const int64_t some = smaller(panels - first, kTaskPanels);
        (task.out.m <= kHeight ? stream_panels : block_panels)(task, some, w, acc);
        for (int64_t p = 0; p < some; ++p) {
            finish_panel(task.out, first + p, acc + p * task.out.m * kPanel);
        }
    }
}

} // namespace

extern const ops::cpu::Bf16Kernels bf16_kernels;
constexpr ops::cpu::Bf16Kernels bf16_kernels = {place_row, linear_pairs, kPanel};

} // namespace llaisys::LLAISYS_CPU_NS
