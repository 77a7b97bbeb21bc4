#include "runtime/runner/model_runner.hpp"

#include "base/graph_rows.hpp"

#include <algorithm>
#include <numeric>

namespace llaisys::runtime {

namespace {

KvStorage make_storage(const device::Stream &stream, const models::KvSpec &spec,
                       const RunnerOptions &options) {
    const DType dtype = options.kv_dtype != LLAISYS_DTYPE_INVALID ? options.kv_dtype : spec.dtype;
    return KvStorage(stream, spec.n_layers, options.n_slots, spec.n_heads, spec.head_dim, dtype,
                     spec.inv_freq, spec.value_dim);
}

// The only sequence of a token.
int64_t sequence_of(const PreparedStep &step, int32_t token) {
    return step.seq_ids[size_t(step.seq_offsets[size_t(token)])];
}

} // namespace

ModelRunner::ModelRunner(const device::Stream &stream, models::Model &model,
                         const RunnerOptions &options)
    : stream_(stream), model_(model), options_(options),
      preparer_(model.spec(), options.max_positions, options.max_ubatch),
      metadata_(model.spec().windows, model.spec().is_bidirectional),
      storage_(make_storage(stream, model.spec().kv, options)),
      workspace_(stream.type(), stream.device_id()),
      graph_(workspace_,
             [&model](const GraphParams &params) {
                 return model.workspace_bytes(params.n_tokens, params.n_outputs);
             }),
      captured_(stream), output_(stream.type(), stream.device_id(), model.spec().vocabulary),
      hidden_(stream.type(), stream.device_id(), model.spec().hidden_size),
      pooler_(model.spec().hidden_size),
      aux_hidden_(stream.type(), stream.device_id(), model.aux_hidden_size()),
      sampler_(stream, model.spec().vocabulary), arena_(stream), device_sampler_(stream) {
    if (options.layout == LLAISYS_KV_LAYOUT_SLOT) {
        cells_.emplace(1, int32_t(options.n_slots), options.max_positions);
    } else {
        blocks_.emplace(options.block_size, int32_t(options.n_slots), options.max_positions);
    }
    reserve_largest_step();
}

void ModelRunner::reserve_largest_step() {
    const int64_t largest = std::min<int64_t>(options_.max_ubatch, options_.n_slots);
    const int64_t n_rows = std::min(largest, options_.reserved_outputs);
    graph_.reserve({largest, largest});
    output_.reserve(n_rows);
    if (aux_hidden_.row_size() > 0) {
        aux_hidden_.reserve(largest);
    }
    // SLOT: one sequence that fills the cache. BLOCK: one row per output, as wide as the longest
    // sequence.
    const int64_t width = std::min(options_.max_positions, options_.n_slots);
    const int64_t blocks = (width + options_.block_size - 1) / options_.block_size;
    arena_.begin(max_input_bytes(largest, n_rows, 0) +
                 metadata_.max_bytes(largest, cells_ ? width : n_rows * blocks));
}

int32_t ModelRunner::step(const LlaisysStepInput &input) {
    const Profile::Scope scope = profile_.prepare("prepare/step");
    clear_output();
    model_.prepare_weights(stream_);
    if (input.n_tokens > options_.n_slots) { // can never fit: its arrays are not read
        require(cells_.has_value(), "n_tokens must be at most the ", options_.n_slots,
                " slots of the KV cache, got ", input.n_tokens);
        return LLAISYS_DECODE_NO_KV_SLOT;
    }
    const PreparedStep &step = preparer_.prepare(input, cells());
    const std::vector<UbatchRange> &ranges = preparer_.split(step);
    output_.reserve(int64_t(step.outputs.size()));
    if (aux_hidden_.row_size() > 0) {
        aux_hidden_.reserve(step.n_tokens);
        step_tokens_.resize(size_t(step.n_tokens));
        std::iota(step_tokens_.begin(), step_tokens_.end(), 0);
    }
    if (!step.pooled.empty()) {
        hidden_.reserve(int64_t(step.pooled.size()));
    }
    for (const int32_t token : step.pooled) {
        pooler_.reserve(sequence_of(step, token));
    }
    const int32_t status = cells_ ? step_slot(step, ranges) : step_block(step, ranges, input);
    if (status == LLAISYS_DECODE_OK && !step.pooled.empty()) {
        pool_hidden(step);
    }
    return status;
}

// In token order, independent of micro-batches.
void ModelRunner::pool_hidden(const PreparedStep &step) {
    const float *row = hidden_.host_rows(stream_);
    for (const int32_t token : step.pooled) {
        const auto how = LlaisysPooling(step.pooling[token]);
        pooler_.add(sequence_of(step, token), how, row);
        row += hidden_.row_size();
    }
}

int32_t ModelRunner::step_slot(const PreparedStep &step, const std::vector<UbatchRange> &ranges) {
    ubatches_.clear();
    for (const UbatchRange &range : ranges) {
        ubatches_.push_back({range.n, step.positions.data() + range.first,
                             step.seq_offsets.data() + range.first, step.seq_ids.data()});
    }
    const KvStatus status = cells_->prepare(ubatches_.data(), int32_t(ubatches_.size()), &plans_);
    if (status == LLAISYS_KV_OOM_SLOT) {
        return LLAISYS_DECODE_NO_KV_SLOT;
    }
    require(status == LLAISYS_KV_OK, "the KV cache rejected the step with code ", int(status));
    apply_kv_update();
    size_t applied = 0;
    try {
        for (; applied < ranges.size();) {
            cells_->apply_ubatch(plans_[applied], ubatches_[applied]);
            const UbatchRange &range = ranges[applied];
            const std::vector<int32_t> &slots = plans_[applied].slots;
            ++applied;
            forward(step, range, [&] { metadata_.build_slot(step, range, *cells_, slots); });
        }
    } catch (...) {
        while (applied-- > 0) {
            cells_->rollback_ubatch(plans_[applied], ubatches_[applied]);
        }
        clear_output();
        throw;
    }
    return LLAISYS_DECODE_OK;
}

int32_t ModelRunner::step_block(const PreparedStep &step, const std::vector<UbatchRange> &ranges,
                                const LlaisysStepInput &input) {
    require(step.seq_offsets.back() == step.n_tokens,
            "n_seq_id must be 1 for every token in the BLOCK layout");
    const std::vector<int32_t> &rows = blocks_->check(input);
    try {
        for (const UbatchRange &range : ranges) {
            forward(step, range, [&] {
                metadata_.build_block(step, range, input, blocks_->block_size(), rows);
            });
        }
    } catch (...) {
        clear_output();
        throw;
    }
    block_used_ = step.n_tokens;
    block_peak_ = std::max(block_peak_, block_used_);
    block_sequences_ = input.n_seq;
    return LLAISYS_DECODE_OK;
}

// A decode step (every token has logits: one per sequence, or a few with draft tokens) is padded to
// a bucket and captured as a graph where the device supports graphs.
template <typename BuildMetadata>
void ModelRunner::forward(const PreparedStep &step, const UbatchRange &range,
                          const BuildMetadata &build_metadata) {
    {
        const Profile::Scope scope = profile_.attn_meta("attn_meta/build");
        build_metadata();
    }
    const bool decodes = blocks_.has_value() && step.embd == nullptr && range.n == step.n_tokens &&
                         range.n_outputs == range.n && range.n_pooled == 0;
    const bool has_runs = metadata_.longest_run() > 1;
    const int64_t bucket = decodes && captured_.are_supported() ? graph_rows(range.n, has_runs) : 0;
    if (bucket > 0 && has_runs) {
        metadata_.split_runs();
    }
    const int64_t n_padded = std::max<int64_t>(bucket, range.n);
    if (n_padded > output_.capacity()) {
        output_.reserve(n_padded);
    }
    if (aux_hidden_.row_size() > 0 &&
        n_padded > aux_hidden_.capacity()) { // captured: the only micro-batch
        aux_hidden_.reserve(n_padded);
    }
    models::ModelInput input;
    models::AttentionMetadata metadata;
    {
        const Profile::Scope scope = profile_.memcpy("memcpy/inputs");
        const int64_t n_embd = step.embd != nullptr ? n_padded * step.embd_size : 0;
        const int64_t n_selected = selects_output_rows(range, n_padded) ? range.n_outputs : 0;
        arena_.begin(max_input_bytes(n_padded, n_selected, n_embd) +
                     metadata_.max_bytes(n_padded, metadata_.n_table_entries()));
        input = build_input(step, range, n_padded);
        // Settled (no entry that attention reads is written by this step): false for runs, where a
        // token sees keys of earlier tokens of the same step.
        metadata = metadata_.put(&arena_, n_padded, bucket > 0 && !has_runs);
        ops::SampledTokens sampled{input.token_ids, {}, device_sampler_.sampled()};
        if (sources_ != nullptr) { // after everything that a graph reads
            sampled.sources = arena_.put(sources_ + range.first, range.n, n_padded, -1);
        }
        arena_.upload(sources_ != nullptr ? &sampled : nullptr);
    }
    metadata.kv = storage_.layers().data();
    models::ForwardOutput output;
    output.logits = output_.append(step.outputs.data() + range.first_output, range.n_outputs,
                                   range.n_outputs + (n_padded - range.n));
    if (aux_hidden_.row_size() > 0) {
        output.aux_hidden =
            aux_hidden_.append(step_tokens_.data() + range.first, range.n, n_padded);
    }
    if (range.n_pooled > 0) {
        output.hidden = hidden_.append(step.pooled.data() + range.first_pooled, range.n_pooled);
    }
    const Profile::Scope scope = profile_.forward(bucket > 0 ? "forward/graph" : "forward/model");
    const GraphParams params{n_padded, output.logits.size(0)};
    const auto body = [&] {
        graph_.run(params, [&] { model_.forward(stream_, workspace_, input, metadata, &output); });
    };
    if (bucket > 0) {
        graph_.reserve(params); // may move the workspace, so before memory_version()
        captured_.run({bucket, metadata_.n_long(n_padded), has_runs, input.lora.rows.defined()},
                      memory_version(), body);
    } else if (range.n == options_.max_ubatch && !has_tuned_) {
        has_tuned_ = true;
        captured_.run_autotuning(body);
    } else {
        body();
    }
}

void ModelRunner::set_aux_hidden_layers(const std::vector<int32_t> &layers) {
    model_.set_aux_hidden_layers(layers);
    clear_output();
    aux_hidden_ = OutputBuffer(stream_.type(), stream_.device_id(), model_.aux_hidden_size());
    captured_.clear(); // graphs write the old buffer
    reserve_largest_step();
}

void ModelRunner::reserve_lora(int64_t n_slots, int64_t max_rank) {
    stream_.synchronize(); // steps in flight read the old slots
    captured_.clear();
    try {
        model_.reserve_lora(&stream_, n_slots, max_rank);
    } catch (...) {
        preparer_.set_lora_slots(0);
        throw;
    }
    preparer_.set_lora_slots(model_.lora_slots());
    reserve_largest_step();
}

// Changes when memory used by captured graphs moves.
uint64_t ModelRunner::memory_version() const {
    uint64_t hash = model_.weights_version();
    for (const uint64_t part : {uint64_t(arena_.generation()), uint64_t(workspace_.allocations()),
                                uint64_t(output_.capacity()), uint64_t(aux_hidden_.capacity())}) {
        hash = (hash ^ part) * 1099511628211u;
    }
    return hash;
}

// Applies pending copies and shifts of seq_cp and seq_add to the bytes.
void ModelRunner::apply_kv_update() {
    if (!cells_->needs_update()) {
        return;
    }
    cells_->update(&update_);
    storage_.copy_slots(stream_, update_.copy_src.data(), update_.copy_dst.data(),
                        int64_t(update_.copy_src.size()));
    storage_.shift_slots(stream_, update_.shift_slots.data(), update_.shift_deltas.data(),
                         int64_t(update_.shift_slots.size()));
}

LlaisysKvStats ModelRunner::kv_stats() const {
    LlaisysKvStats stats{};
    stats.struct_size = sizeof stats;
    stats.layout = options_.layout;
    stats.capacity_slots = options_.n_slots;
    stats.bytes = storage_.bytes();
    stats.block_size = cells_ ? 1 : options_.block_size;
    if (cells_) {
        const KvCacheStats cells = cells_->stats();
        stats.used_slots = cells.used;
        stats.peak_used_slots = cells.peak;
        stats.n_sequences = cells.n_sequences;
    } else {
        stats.used_slots = block_used_;
        stats.peak_used_slots = block_peak_;
        stats.n_sequences = block_sequences_;
    }
    return stats;
}

std::string ModelRunner::kv_dump() const {
    return cells_ ? cells_->dump()
                  : std::string("the caller owns the metadata of the BLOCK layout\n");
}

void ModelRunner::check_slots(const char *name, const int32_t *slots, int32_t n) const {
    for (int32_t i = 0; i < n; ++i) {
        require(slots[i] >= 0 && slots[i] < options_.n_slots, name, "[", i, "] must be in [0, ",
                options_.n_slots, "), got ", slots[i]);
    }
}

void ModelRunner::check_distinct(const char *name, const int32_t *slots, int32_t n) {
    local_rows_.assign(slots, slots + n);
    std::sort(local_rows_.begin(), local_rows_.end());
    const auto repeated = std::adjacent_find(local_rows_.begin(), local_rows_.end());
    require(repeated == local_rows_.end(), name, " names slot ",
            repeated == local_rows_.end() ? -1 : *repeated, " twice");
}

void ModelRunner::copy_slots(const int32_t *src, const int32_t *dst, int32_t n) {
    check_slots("src", src, n);
    check_slots("dst", dst, n);
    check_distinct("dst", dst, n);
    storage_.copy_slots(stream_, src, dst, n);
}

void ModelRunner::shift_slots(const int32_t *slots, const int64_t *delta, int32_t n) {
    check_slots("slots", slots, n);
    check_distinct("slots", slots, n);
    storage_.shift_slots(stream_, slots, delta, n);
}

} // namespace llaisys::runtime
