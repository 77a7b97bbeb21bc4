// What a device finds out about rows of logits so that they need not come to the host.
#include "ops/topk/op.hpp"
#include "runtime/runner/device_draw.hpp"

#include <algorithm>
#include <cstring>

namespace llaisys::runtime {

namespace {

// Results that come to the host in one copy, one behind the other.
class Layout {
public:
    // Where n values of so many bytes begin.
    int64_t take(int64_t n, int64_t element_bytes) {
        const int64_t at = bytes_;
        bytes_ += StepArena::bytes_for(n, element_bytes);
        return at;
    }
    int64_t bytes() const { return bytes_; }

private:
    int64_t bytes_ = 0;
};

template <typename T> int64_t bytes_for(const std::vector<T> &values) {
    return StepArena::bytes_for(std::max<int64_t>(1, int64_t(values.size())), sizeof(T));
}

// Puts values into the arena; at least one, so that there is something to point to.
template <typename T> Tensor put(StepArena *arena, const std::vector<T> &values) {
    Tensor tensor;
    T *to = arena->take<T>({std::max<int64_t>(1, int64_t(values.size()))}, &tensor);
    std::copy(values.begin(), values.end(), to);
    return tensor;
}

} // namespace

ops::RowAdjustments DeviceDraw::upload(const DrawPlan &plan, int64_t vocabulary,
                                       Tensor *temperatures, Tensor *uniforms) {
    const int64_t mask_words = (vocabulary + 31) / 32;
    const int64_t n_words = plan.adjusts ? std::max<int64_t>(1, plan.n_masks * mask_words) : 1;
    int64_t bytes = bytes_for(plan.rows) + bytes_for(plan.temperatures) + bytes_for(plan.uniforms);
    if (plan.adjusts) {
        bytes += StepArena::bytes_for(n_words, sizeof(int32_t));
        for (const auto *integers :
             {&plan.mask_rows, &plan.bias_offsets, &plan.bias_ids, &plan.history_offsets,
              &plan.history_tokens, &plan.history_drawn}) {
            bytes += bytes_for(*integers);
        }
        bytes += bytes_for(plan.bias_values) + bytes_for(plan.penalties);
    }
    arena_.begin(bytes);
    ops::RowAdjustments made;
    made.rows = put(&arena_, plan.rows);
    *temperatures = put(&arena_, plan.temperatures);
    auto *bits = arena_.take<int64_t>({int64_t(plan.uniforms.size())}, uniforms);
    std::memcpy(bits, plan.uniforms.data(), plan.uniforms.size() * sizeof(double));
    if (plan.adjusts) {
        auto *words = arena_.take<int32_t>({n_words}, &made.masks);
        if (plan.n_masks > 0) {
            std::memcpy(words, plan.masks, size_t(n_words) * sizeof(int32_t));
        }
        made.mask_rows = put(&arena_, plan.mask_rows);
        made.bias_offsets = put(&arena_, plan.bias_offsets);
        made.bias_ids = put(&arena_, plan.bias_ids);
        made.bias_values = put(&arena_, plan.bias_values);
        made.history_offsets = put(&arena_, plan.history_offsets);
        made.history_tokens = put(&arena_, plan.history_tokens);
        made.history_drawn = put(&arena_, plan.history_drawn);
        made.penalties = put(&arena_, plan.penalties);
    }
    arena_.upload();
    return made;
}

ReducedRows DeviceDraw::reduce(const Tensor &logits, const DrawPlan &plan) {
    const int64_t n = int64_t(plan.rows.size());
    const int64_t outputs = logits.size(0);
    const int64_t vocabulary = logits.size(1);
    const int64_t k = most_best(vocabulary);
    const bool has_raw = plan.wants_raw && plan.adjusts; // best of their own
    const int64_t best_rows = plan.adjusts ? n : outputs;
    Layout layout;
    const int64_t ids_at = layout.take(best_rows * k, sizeof(int32_t));
    const int64_t values_at = layout.take(best_rows * k, sizeof(float));
    const int64_t sums_at = layout.take(n, sizeof(double));
    const int64_t picks_at = layout.take(n, sizeof(int32_t));
    const int64_t raw_sums_at = layout.take(n, sizeof(double));
    const int64_t raw_ids_at = has_raw ? layout.take(outputs * k, sizeof(int32_t)) : ids_at;
    const int64_t raw_values_at = has_raw ? layout.take(outputs * k, sizeof(float)) : values_at;
    reserve(&reduced_, layout.bytes());
    const auto on_device = [&](int64_t at, const Shape &shape, DType dtype) {
        return Tensor::on(reduced_.device, at, shape, dtype);
    };

    Tensor temperatures;
    Tensor uniforms;
    const ops::RowAdjustments adjustments = upload(plan, vocabulary, &temperatures, &uniforms);
    Tensor source = logits;
    if (plan.adjusts) {
        const int64_t bytes = n * vocabulary * int64_t(sizeof(float));
        if (bytes > adjusted_bytes_) {
            adjusted_ = std::make_shared<Storage>(stream_.type(), stream_.device_id(), bytes);
            adjusted_bytes_ = bytes;
        }
        source = Tensor::on(adjusted_, 0, {n, vocabulary}, LLAISYS_DTYPE_F32);
        ops::adjust_rows(stream_, source, logits, adjustments);
    }
    const Tensor values = on_device(values_at, {best_rows, k}, LLAISYS_DTYPE_F32);
    ops::topk(stream_, on_device(ids_at, {best_rows, k}, LLAISYS_DTYPE_I32), values, source);
    if (plan.wants_sums || plan.wants_picks) {
        ops::weigh_rows(stream_, on_device(sums_at, {n}, LLAISYS_DTYPE_I64),
                        on_device(picks_at, {n}, LLAISYS_DTYPE_I32), source, values,
                        plan.adjusts ? Tensor() : adjustments.rows, temperatures,
                        plan.wants_picks ? uniforms : Tensor());
    }
    if (plan.wants_raw) {
        const Tensor raw_values = on_device(raw_values_at, {outputs, k}, LLAISYS_DTYPE_F32);
        if (has_raw) {
            ops::topk(stream_, on_device(raw_ids_at, {outputs, k}, LLAISYS_DTYPE_I32), raw_values,
                      logits);
        }
        ops::weigh_rows(stream_, on_device(raw_sums_at, {n}, LLAISYS_DTYPE_I64), Tensor(), logits,
                        raw_values, adjustments.rows, Tensor(), Tensor());
    }
    bring(reduced_, layout.bytes());
    stream_.synchronize();

    const std::byte *host = reduced_.host;
    ReducedRows found;
    found.k = k;
    found.is_adjusted = plan.adjusts;
    found.ids = reinterpret_cast<const int32_t *>(host + ids_at);
    found.values = reinterpret_cast<const float *>(host + values_at);
    if (plan.wants_sums || plan.wants_picks) {
        found.sums = reinterpret_cast<const double *>(host + sums_at);
    }
    if (plan.wants_picks) {
        found.picks = reinterpret_cast<const int32_t *>(host + picks_at);
    }
    if (plan.wants_raw) {
        found.raw_ids = reinterpret_cast<const int32_t *>(host + raw_ids_at);
        found.raw_values = reinterpret_cast<const float *>(host + raw_values_at);
        found.raw_sums = reinterpret_cast<const double *>(host + raw_sums_at);
    }
    return found;
}

const float *DeviceDraw::bring_rows(const Tensor &logits, const std::vector<int32_t> &rows) {
    const int64_t row_bytes = logits.size(1) * int64_t(sizeof(float));
    const int64_t bytes = row_bytes * int64_t(rows.size());
    if (bytes > rows_.bytes) {
        if (rows_.host != nullptr) {
            stream_.runtime().release_host(rows_.host);
            rows_.host = nullptr;
        }
        rows_.host = static_cast<std::byte *>(stream_.runtime().allocate_host(size_t(bytes)));
        rows_.bytes = bytes;
    }
    for (size_t i = 0; i < rows.size(); ++i) {
        stream_.runtime().copy(rows_.host + int64_t(i) * row_bytes,
                               logits.data() + rows[i] * row_bytes, size_t(row_bytes),
                               device::CopyKind::device_to_host, stream_.native());
    }
    stream_.synchronize();
    return reinterpret_cast<const float *>(rows_.host);
}

} // namespace llaisys::runtime
