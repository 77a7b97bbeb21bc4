#include "runtime/runner/device_sampler.hpp"

#include "ops/topk/op.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace llaisys::runtime {

namespace {

template <typename T> int64_t bytes_for(const std::vector<T> &values) {
    return StepArena::bytes_for(std::max<int64_t>(1, int64_t(values.size())), sizeof(T));
}

// Copies values into the arena; allocates at least one.
template <typename T> Tensor put(StepArena *arena, const std::vector<T> &values) {
    const auto n = int64_t(values.size());
    return arena->put(values.data(), n, std::max<int64_t>(1, n));
}

} // namespace

DeviceSampler::DeviceSampler(const device::Stream &stream)
    : stream_(stream), samples_{Sample(stream), Sample(stream)},
      scratch_(stream.type(), stream.device_id()) {
    for (Sample &sample : samples_) {
        sample.done_event = stream.runtime().create_event(stream.device_id());
    }
}

DeviceSampler::~DeviceSampler() {
    for (const HostMemory *memory : {&samples_[0].host, &samples_[1].host, &rows_}) {
        if (memory->data != nullptr) {
            stream_.runtime().release_host(memory->data);
        }
    }
    for (const Sample &sample : samples_) {
        stream_.runtime().destroy_event(sample.done_event);
    }
}

void DeviceSampler::reserve(HostMemory *memory, int64_t bytes) {
    if (bytes <= memory->bytes) {
        return;
    }
    bytes = std::max<int64_t>({bytes, 2 * memory->bytes, 1024});
    if (memory->data != nullptr) {
        stream_.synchronize(); // a copy into it may be in flight
        stream_.runtime().release_host(memory->data);
        *memory = {}; // if the allocation below throws
    }
    memory->data = static_cast<std::byte *>(stream_.runtime().allocate_host(size_t(bytes)));
    memory->bytes = bytes;
}

// Runs allocate(&workspace) without memory to measure it, then with enough of it.
template <typename Allocate>
void DeviceSampler::allocate_in(Workspace *workspace, const Allocate &allocate) {
    Workspace measured = Workspace::measuring();
    allocate(&measured);
    if (measured.used() > workspace->capacity()) {
        stream_.synchronize(); // queued work may use the old memory
        constexpr int64_t kMostSpare = 1 << 20;
        workspace->reserve(
            std::max(measured.used(), std::min(2 * workspace->capacity(), kMostSpare)));
    }
    workspace->begin();
    allocate(workspace);
}

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

void DeviceSampler::find(const Tensor &logits, const SamplingPlan &plan,
                         const UploadedPlan &uploaded, RowStats *found) {
    const int64_t n = int64_t(plan.rows.size());
    const int64_t outputs = logits.size(0);
    const int64_t vocabulary = logits.size(1);
    const int64_t k = std::min(vocabulary, kMaxTopK);
    const bool has_raw = plan.needs_raw && plan.adjusts; // separate top-k of unadjusted rows
    const int64_t best_rows = plan.adjusts ? n : outputs;
    found->source = logits;
    allocate_in(&scratch_, [&](Workspace *scratch) {
        found->ids = scratch->allocate({best_rows, k}, LLAISYS_DTYPE_I32);
        found->values = scratch->allocate({best_rows, k}, LLAISYS_DTYPE_F32);
        found->sums = scratch->allocate({n}, LLAISYS_DTYPE_I64);
        found->picks = scratch->allocate({n}, LLAISYS_DTYPE_I32);
        found->raw_ids = found->ids;
        found->raw_values = found->values;
        if (has_raw) {
            found->raw_ids = scratch->allocate({outputs, k}, LLAISYS_DTYPE_I32);
            found->raw_values = scratch->allocate({outputs, k}, LLAISYS_DTYPE_F32);
        }
        if (plan.adjusts) {
            found->source = scratch->allocate({n, vocabulary}, LLAISYS_DTYPE_F32);
        }
    });
    if (plan.adjusts) {
        ops::adjust_rows(stream_, found->source, logits, uploaded.adjustments);
    }
    ops::topk(stream_, found->ids, found->values, found->source);
    if (plan.needs_sums || plan.needs_picks) {
        ops::weigh_rows(stream_, found->sums, found->picks, found->source, found->values,
                        uploaded.samples.rows, uploaded.samples.temperatures,
                        plan.needs_picks ? uploaded.samples.uniforms : Tensor());
    }
    if (has_raw) {
        ops::topk(stream_, found->raw_ids, found->raw_values, logits);
    }
}

int DeviceSampler::queue(const Tensor &logits, const SamplingPlan &plan) {
    Sample &sample = samples_[1 - last_];
    plan.is_greedy ? queue_argmax(logits, &sample) : queue_plan(logits, plan, &sample);
    sample.is_by_output = plan.is_greedy;
    sample.on_host.assign(plan.on_host.begin(), plan.on_host.end());
    last_ = 1 - last_;
    stream_.runtime().record_event(sample.done_event, stream_.native());
    return last_;
}

void DeviceSampler::queue_argmax(const Tensor &logits, Sample *sample) {
    sample->found = {};
    if (!logits.defined()) {
        return;
    }
    Tensor values;
    Tensor ids;
    allocate_in(&sample->results, [&](Workspace *results) {
        ids = results->allocate({logits.size(0)}, LLAISYS_DTYPE_I64);
        values = results->allocate({logits.size(0)}, LLAISYS_DTYPE_F32);
    });
    reserve(&sample->host, sample->results.used());
    sample->ids = sample->on_host_as<int64_t>(ids);
    sample->values = sample->on_host_as<float>(values);
    sampled_ = ids;
    ops::argmax(stream_, ids, values, logits, {sample->ids, sample->values});
}

void DeviceSampler::queue_plan(const Tensor &logits, const SamplingPlan &plan, Sample *sample) {
    const int64_t n = int64_t(plan.rows.size());
    const int64_t m = std::max(1, plan.n_logprobs);
    Tensor ids, is_undecided, raw_sums;
    ops::RowRanks ranks;
    allocate_in(&sample->results, [&](Workspace *results) {
        ids = results->allocate({n}, LLAISYS_DTYPE_I64);
        is_undecided = results->allocate({n}, LLAISYS_DTYPE_I32);
        if (plan.needs_raw) {
            raw_sums = results->allocate({n}, LLAISYS_DTYPE_I64);
            ranks = {results->allocate({n}, LLAISYS_DTYPE_F32),
                     results->allocate({n}, LLAISYS_DTYPE_I32),
                     results->allocate({n, m}, LLAISYS_DTYPE_I32),
                     results->allocate({n, m}, LLAISYS_DTYPE_F32)};
        }
    });
    reserve(&sample->host, sample->results.used());
    sample->found = {};
    UploadedPlan uploaded = upload(plan, logits.size(1), &sample->arena);
    uploaded.adjustments.sampled = sampled_;
    RowStats found;
    find(logits, plan, uploaded, &found);
    sampled_ = ids;
    ops::sample_rows(stream_, ids, is_undecided, found.source, found.ids, found.values, found.sums,
                     found.picks, uploaded.samples);
    sample->ids = sample->on_host_as<int64_t>(ids);
    sample->is_undecided = sample->on_host_as<int32_t>(is_undecided);
    if (plan.needs_raw) {
        ops::weigh_rows(stream_, raw_sums, Tensor(), logits, found.raw_values,
                        uploaded.adjustments.rows, Tensor(), Tensor());
        ops::rank_rows(stream_, ranks, ids, logits, uploaded.adjustments.rows, found.raw_ids,
                       found.raw_values);
        sample->found = {m,
                         sample->on_host_as<int32_t>(ranks.top_ids),
                         sample->on_host_as<float>(ranks.tops),
                         sample->on_host_as<double>(raw_sums),
                         sample->on_host_as<float>(ranks.logits),
                         sample->on_host_as<int32_t>(ranks.ranks)};
    }
    ops::bring_out(stream_, sample->host.data, ids.data(), sample->results.used());
}

bool DeviceSampler::is_done(int slot) const {
    return stream_.runtime().query_event(samples_[slot].done_event);
}

void DeviceSampler::finish(int slot, const LlaisysSamplingMetadata &sampling, int32_t *ids,
                           std::vector<int32_t> *undecided) const {
    while (!is_done(slot)) {
    }
    const Sample &sample = samples_[slot];
    for (int32_t r = 0; r < sampling.n_rows; ++r) {
        const int32_t row = sample.is_by_output && sampling.rows != nullptr ? sampling.rows[r] : r;
        const bool is_decided =
            sample.is_by_output ? sample.values[row] > -INFINITY : sample.is_undecided[row] == 0;
        ids[r] = int32_t(sample.ids[row]);
        if (!is_decided || sample.on_host[size_t(r)] != 0) {
            undecided->push_back(r);
        }
    }
}

const float *DeviceSampler::copy_rows_to_host(const Tensor &logits,
                                              const std::vector<int32_t> &rows) {
    const int64_t row_bytes = logits.size(1) * int64_t(sizeof(float));
    reserve(&rows_, row_bytes * int64_t(rows.size()));
    for (size_t i = 0; i < rows.size(); ++i) {
        stream_.runtime().copy(rows_.data + int64_t(i) * row_bytes,
                               logits.data() + rows[i] * row_bytes, size_t(row_bytes),
                               device::CopyKind::device_to_host, stream_.native());
    }
    stream_.synchronize();
    return reinterpret_cast<const float *>(rows_.data);
}

} // namespace llaisys::runtime
