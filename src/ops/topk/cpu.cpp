#include "ops/topk/op.hpp"

#include "ops/cpu/rows.hpp"

#include <limits>

namespace llaisys::ops {

namespace {

// Largest value of one row of n values and its first index; index 0 for a row of NaN.
int64_t argmax_row(const cpu::Kernels &kernels, cpu::Values row, int64_t n) {
    float buffer[cpu::kPiece];
    const int64_t step = row.dtype == LLAISYS_DTYPE_F32 ? n : cpu::kPiece;
    float best = -std::numeric_limits<float>::infinity();
    int64_t best_at = n; // start of the chunk with the largest value
    for (int64_t i = 0; i < n; i += step) {
        const int64_t piece = std::min(step, n - i);
        const float *values = cpu::read(kernels, row.from(i), buffer, piece);
        const float largest = kernels.max(values, piece);
        const bool found = largest > best || best_at == n;
        const int64_t place = found ? kernels.find_equal(values, largest, piece) : piece;
        if (place < piece) { // false when all values are NaN
            best = largest;
            best_at = i + place;
        }
    }
    return best_at == n ? 0 : best_at;
}

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

void argmax_cpu(const device::Stream &stream, const Tensor &max_index, const Tensor &max_value,
                const Tensor &values, const ArgmaxOnHost &host) {
    const int64_t rows = values.size(0);
    const int64_t n = values.size(1);
    const cpu::Kernels &kernels = cpu::kernels();
    cpu::for_rows(stream, rows, n, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
            const cpu::Values row = cpu::values_of(values, r * n);
            const int64_t index = argmax_row(kernels, row, n);
            max_index.as<int64_t>()[r] = index;
            cpu::convert(kernels, cpu::values_of(max_value, r), row.from(index), 1);
            if (host.index != nullptr) {
                host.index[r] = index;
                cpu::convert(kernels, cpu::values_of(host.value + r), row.from(index), 1);
            }
        }
    });
}

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
