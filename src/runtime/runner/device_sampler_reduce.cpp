// Planned sampling on the device, and reduction of logits rows for the host Sampler.
#include "ops/topk/op.hpp"
#include "runtime/runner/device_sampler.hpp"

#include <algorithm>
#include <cstring>

namespace llaisys::runtime {

namespace {

// Offsets of results that are copied to the host together.
class Layout {
public:
    // Reserves n values and returns their offset.
    int64_t add(int64_t n, int64_t element_bytes) {
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

// Copies values into the arena; allocates at least one.
template <typename T> Tensor put(StepArena *arena, const std::vector<T> &values) {
    Tensor tensor;
    T *to = arena->allocate<T>({std::max<int64_t>(1, int64_t(values.size()))}, &tensor);
    std::copy(values.begin(), values.end(), to);
    return tensor;
}

} // namespace

DeviceSampler::UploadedPlan DeviceSampler::upload(const SamplingPlan &plan, int64_t vocabulary,
                                                  StepArena *arena) {
    const int64_t mask_words = (vocabulary + 31) / 32;
    const int64_t n_words = plan.adjusts ? std::max<int64_t>(1, plan.n_masks * mask_words) : 1;
    int64_t bytes = bytes_for(plan.rows) + bytes_for(plan.temperatures) + bytes_for(plan.uniforms) +
                    bytes_for(plan.kinds) + bytes_for(plan.processor_offsets) +
                    bytes_for(plan.processors) + bytes_for(plan.processor_values);
    if (plan.adjusts) {
        bytes += StepArena::bytes_for(n_words, sizeof(int32_t));
        for (const auto *integers :
             {&plan.mask_rows, &plan.bias_offsets, &plan.bias_ids, &plan.history_offsets,
              &plan.history_tokens, &plan.history_sampled, &plan.pending_rows}) {
            bytes += bytes_for(*integers);
        }
        bytes += bytes_for(plan.bias_values) + bytes_for(plan.penalties);
    }
    arena->begin(bytes);
    UploadedPlan made;
    ops::RowAdjustments &adjustments = made.adjustments;
    ops::RowSampling &samples = made.samples;
    adjustments.rows = put(arena, plan.rows);
    samples.temperatures = put(arena, plan.temperatures);
    auto *bits = arena->allocate<int64_t>({int64_t(plan.uniforms.size())}, &samples.uniforms);
    std::memcpy(bits, plan.uniforms.data(), plan.uniforms.size() * sizeof(double));
    samples.rows = plan.adjusts ? Tensor() : adjustments.rows;
    samples.kinds = put(arena, plan.kinds);
    samples.may_be_wide = plan.async == SamplingPlan::Async::maybe;
    samples.processor_offsets = put(arena, plan.processor_offsets);
    samples.processors = put(arena, plan.processors);
    samples.processor_values = put(arena, plan.processor_values);
    if (plan.adjusts) {
        auto *words = arena->allocate<int32_t>({n_words}, &adjustments.masks);
        if (plan.n_masks > 0) {
            std::memcpy(words, plan.masks, size_t(n_words) * sizeof(int32_t));
        }
        adjustments.mask_rows = put(arena, plan.mask_rows);
        adjustments.bias_offsets = put(arena, plan.bias_offsets);
        adjustments.bias_ids = put(arena, plan.bias_ids);
        adjustments.bias_values = put(arena, plan.bias_values);
        adjustments.history_offsets = put(arena, plan.history_offsets);
        adjustments.history_tokens = put(arena, plan.history_tokens);
        adjustments.history_sampled = put(arena, plan.history_sampled);
        adjustments.penalties = put(arena, plan.penalties);
        if (!plan.pending_rows.empty()) {
            adjustments.pending_rows = put(arena, plan.pending_rows);
        }
    }
    arena->upload();
    return made;
}

DeviceSampler::RowStats DeviceSampler::find(const Tensor &logits, const SamplingPlan &plan,
                                            const UploadedPlan &uploaded) {
    const int64_t n = int64_t(plan.rows.size());
    const int64_t outputs = logits.size(0);
    const int64_t vocabulary = logits.size(1);
    const int64_t k = max_top_k(vocabulary);
    const bool has_raw = plan.needs_raw && plan.adjusts; // separate top-k of unadjusted rows
    const int64_t best_rows = plan.adjusts ? n : outputs;
    Layout layout;
    const int64_t ids_at = layout.add(best_rows * k, sizeof(int32_t));
    const int64_t values_at = layout.add(best_rows * k, sizeof(float));
    const int64_t sums_at = layout.add(n, sizeof(double));
    const int64_t picks_at = layout.add(n, sizeof(int32_t));
    const int64_t raw_sums_at = layout.add(n, sizeof(double));
    const int64_t raw_ids_at = has_raw ? layout.add(outputs * k, sizeof(int32_t)) : ids_at;
    const int64_t raw_values_at = has_raw ? layout.add(outputs * k, sizeof(float)) : values_at;
    reserve(&reduced_, layout.bytes());
    const auto on_device = [&](int64_t at, const Shape &shape, DType dtype) {
        return Tensor::on(reduced_.device, at, shape, dtype);
    };
    RowStats found;
    found.bytes = layout.bytes();
    found.ids = on_device(ids_at, {best_rows, k}, LLAISYS_DTYPE_I32);
    found.values = on_device(values_at, {best_rows, k}, LLAISYS_DTYPE_F32);
    found.sums = on_device(sums_at, {n}, LLAISYS_DTYPE_I64);
    found.picks = on_device(picks_at, {n}, LLAISYS_DTYPE_I32);

    Tensor source = logits;
    if (plan.adjusts) {
        const int64_t bytes = n * vocabulary * int64_t(sizeof(float));
        if (bytes > adjusted_bytes_) {
            stream_.synchronize(); // queued work may read the old memory
            adjusted_.reset();
            adjusted_bytes_ = 0; // if the allocation below throws
            adjusted_ = std::make_shared<Storage>(stream_.type(), stream_.device_id(), bytes);
            adjusted_bytes_ = bytes;
        }
        source = Tensor::on(adjusted_, 0, {n, vocabulary}, LLAISYS_DTYPE_F32);
        ops::adjust_rows(stream_, source, logits, uploaded.adjustments);
    }
    found.source = source;
    ops::topk(stream_, found.ids, found.values, source);
    if (plan.needs_sums || plan.needs_picks) {
        ops::weigh_rows(stream_, found.sums, found.picks, source, found.values,
                        uploaded.samples.rows, uploaded.samples.temperatures,
                        plan.needs_picks ? uploaded.samples.uniforms : Tensor());
    }
    if (plan.needs_raw) {
        found.raw_ids = on_device(raw_ids_at, {outputs, k}, LLAISYS_DTYPE_I32);
        found.raw_values = on_device(raw_values_at, {outputs, k}, LLAISYS_DTYPE_F32);
        found.raw_sums = on_device(raw_sums_at, {n}, LLAISYS_DTYPE_I64);
        if (has_raw) {
            ops::topk(stream_, found.raw_ids, found.raw_values, logits);
        }
        ops::weigh_rows(stream_, found.raw_sums, Tensor(), logits, found.raw_values,
                        uploaded.adjustments.rows, Tensor(), Tensor());
    }
    return found;
}

int DeviceSampler::queue(const Tensor &logits, const SamplingPlan &plan) {
    const int64_t n = int64_t(plan.rows.size());
    const int64_t vocabulary = logits.size(1);
    const int64_t m = std::max(1, plan.n_logprobs);
    Layout layout;
    const int64_t ids_at = layout.add(n, sizeof(int64_t));
    const int64_t is_undecided_at = layout.add(n, sizeof(int32_t));
    const int64_t n_ranked = plan.needs_raw ? n : 0;
    const int64_t sums_at = layout.add(n_ranked, sizeof(double));
    const int64_t logits_at = layout.add(n_ranked, sizeof(float));
    const int64_t ranks_at = layout.add(n_ranked, sizeof(int32_t));
    const int64_t top_ids_at = layout.add(n_ranked * m, sizeof(int32_t));
    const int64_t tops_at = layout.add(n_ranked * m, sizeof(float));

    const Tensor before = sampled_;
    Sample &sample = acquire(layout.bytes());
    sample.is_planned = true;
    const auto on_device = [&](int64_t at, const Shape &shape, DType dtype) {
        return Tensor::on(sample.staging.device, at, shape, dtype);
    };
    const auto on_host = [&](int64_t at) { return sample.staging.host + at; };
    UploadedPlan uploaded = upload(plan, vocabulary, &sample.arena);
    uploaded.adjustments.sampled = before;
    const RowStats found = find(logits, plan, uploaded);
    sampled_ = on_device(ids_at, {n}, LLAISYS_DTYPE_I64);
    ops::sample_rows(stream_, sampled_, on_device(is_undecided_at, {n}, LLAISYS_DTYPE_I32),
                     found.source, found.ids, found.values, found.sums, found.picks,
                     uploaded.samples);
    sample.ids = reinterpret_cast<const int64_t *>(on_host(ids_at));
    sample.is_undecided = reinterpret_cast<const int32_t *>(on_host(is_undecided_at));
    if (plan.needs_raw) {
        const ops::RowRanks ranks{on_device(logits_at, {n}, LLAISYS_DTYPE_F32),
                                  on_device(ranks_at, {n}, LLAISYS_DTYPE_I32),
                                  on_device(top_ids_at, {n, m}, LLAISYS_DTYPE_I32),
                                  on_device(tops_at, {n, m}, LLAISYS_DTYPE_F32)};
        ops::rank_rows(stream_, ranks, sampled_, logits, uploaded.adjustments.rows, found.raw_ids,
                       found.raw_values);
        stream_.runtime().copy(sample.staging.device->data() + sums_at, found.raw_sums.data(),
                               size_t(n) * sizeof(double), device::CopyKind::device_to_device,
                               stream_.native());
        sample.found = {m,
                        reinterpret_cast<const int32_t *>(on_host(top_ids_at)),
                        reinterpret_cast<const float *>(on_host(tops_at)),
                        reinterpret_cast<const double *>(on_host(sums_at)),
                        reinterpret_cast<const float *>(on_host(logits_at)),
                        reinterpret_cast<const int32_t *>(on_host(ranks_at))};
    }
    copy_to_host(sample.staging, layout.bytes());
    return record_done(sample);
}

ReducedRows DeviceSampler::reduce(const Tensor &logits, const SamplingPlan &plan) {
    const RowStats on_device = find(logits, plan, upload(plan, logits.size(1), &arena_));
    copy_to_host(reduced_, on_device.bytes);
    stream_.synchronize();

    const auto on_host = [&](const Tensor &tensor) {
        return reduced_.host + (tensor.data() - reduced_.device->data());
    };
    ReducedRows found;
    found.k = max_top_k(logits.size(1));
    found.is_adjusted = plan.adjusts;
    found.ids = reinterpret_cast<const int32_t *>(on_host(on_device.ids));
    found.values = reinterpret_cast<const float *>(on_host(on_device.values));
    if (plan.needs_sums || plan.needs_picks) {
        found.sums = reinterpret_cast<const double *>(on_host(on_device.sums));
    }
    if (plan.needs_picks) {
        found.picks = reinterpret_cast<const int32_t *>(on_host(on_device.picks));
    }
    if (plan.needs_raw) {
        found.raw_ids = reinterpret_cast<const int32_t *>(on_host(on_device.raw_ids));
        found.raw_values = reinterpret_cast<const float *>(on_host(on_device.raw_values));
        found.raw_sums = reinterpret_cast<const double *>(on_host(on_device.raw_sums));
    }
    return found;
}

const float *DeviceSampler::copy_rows_to_host(const Tensor &logits,
                                              const std::vector<int32_t> &rows) {
    const int64_t row_bytes = logits.size(1) * int64_t(sizeof(float));
    const int64_t bytes = row_bytes * int64_t(rows.size());
    if (bytes > rows_.bytes) {
        if (rows_.host != nullptr) {
            stream_.runtime().release_host(rows_.host);
            rows_ = {};
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
