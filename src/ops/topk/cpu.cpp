#include "ops/topk/op.hpp"

#include "ops/cpu/rows.hpp"

#include <limits>

namespace llaisys::ops {

namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct Candidate {
    float value; // never NaN
    int32_t index;
};

// Descending values, ascending indices among equals: a strict order, so the result is unique.
bool before(const Candidate &a, const Candidate &b) {
    return a.value != b.value ? a.value > b.value : a.index < b.index;
}

Candidate candidate(const float *row, int64_t i) {
    return {row[i] == row[i] ? row[i] : kLowest, int32_t(i)};
}

// heap [k]: the best k so far, the worst on top; a scan skips values that are not above it.
void select(const cpu::Kernels &kernels, const float *row, int64_t n, Candidate *heap, int64_t k) {
    for (int64_t i = 0; i < k; ++i) {
        heap[i] = candidate(row, i);
    }
    std::make_heap(heap, heap + k, before);
    for (int64_t i = k; i < n;) {
        i += kernels.find_greater(row + i, heap[0].value, n - i);
        if (i < n) { // an equal value with a higher index ranks below the worst and is skipped
            std::pop_heap(heap, heap + k, before);
            heap[k - 1] = candidate(row, i++);
            std::push_heap(heap, heap + k, before);
        }
    }
    std::sort_heap(heap, heap + k, before);
}

} // namespace

void topk_cpu(const device::Stream &stream, const Tensor &index, const Tensor &value,
              const Tensor &values) {
    const int64_t rows = values.size(0);
    const int64_t n = values.size(1);
    const int64_t k = value.size(1);
    static thread_local cpu::Scratch scratch;
    static_assert(sizeof(Candidate) == 2 * sizeof(float));
    auto *heaps = reinterpret_cast<Candidate *>(scratch.floats(rows * k * 2));
    const cpu::Kernels &kernels = cpu::kernels();
    cpu::for_rows(stream, rows, n, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            Candidate *heap = heaps + r * k;
            select(kernels, values.as<float>() + r * n, n, heap, k);
            for (int64_t i = 0; i < k; ++i) {
                index.as<int32_t>()[r * k + i] = heap[i].index;
                value.as<float>()[r * k + i] = heap[i].value;
            }
        }
    });
}

} // namespace llaisys::ops
