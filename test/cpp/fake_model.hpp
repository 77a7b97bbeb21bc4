// A model that records its inputs, and a runner around it; for runner tests. Include once.
#pragma once

#include "check.hpp"
#include "runtime/runner/model_runner.hpp"
#include "sample_rows_reference.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

namespace fake {

using namespace llaisys;
using namespace llaisys::runtime;

using Ints = std::vector<int64_t>;
constexpr int64_t kVocabulary = 50;
constexpr int64_t kHidden = 3;

template <typename T> Ints list_of(const Tensor &tensor) {
    return tensor.defined() ? Ints(tensor.as<T>(), tensor.as<T>() + tensor.elements()) : Ints();
}

// Recorded inputs of one forward.
struct Seen {
    Ints tokens, positions, output_rows, slots, rows, begin, end, tables;
    std::vector<float> embeddings;
    Shape table_shape;
    int32_t block_size = 0;
    std::vector<Ints> visible; // keys visible to each token, in order
    Ints begin_of_layer_1;
    bool shares_lists = false;
};

// Keys are the token id (or the first value of the embedding) in layer 0, plus 1000 in layer 1;
// values are the position. The argmax of a token's logits is token + 1.
class FakeModel final : public models::Model {
public:
    explicit FakeModel(std::vector<int64_t> windows = {0, 0})
        : Model(spec_of(std::move(windows))) {}
    void *weights() override { return nullptr; }
    void replace_weight(const device::Stream &, const char *, int, llaisysTensor_t) override {}
    void prepare_weights(const device::Stream &) override {
        events.push_back("weights");
        require(!weights_missing, "weight q of layer 1 is missing");
    }
    int64_t workspace_bytes(int64_t n_tokens, int64_t n_outputs) const override {
        return Workspace::aligned((n_tokens + n_outputs) * kHidden * int64_t(sizeof(float)));
    }
    void forward(const device::Stream &, Workspace &workspace, const models::ModelInput &input,
                 const models::AttentionMetadata &attention,
                 models::ForwardOutput *output) override {
        events.push_back("forward");
        workspace.allocate({input.n_tokens + output->logits.size(0), kHidden}, LLAISYS_DTYPE_F32);
        Seen now = read(input, attention);
        for (int64_t i = 0; i < input.n_tokens; ++i) {
            const float key = input.token_ids.defined() ? float(now.tokens[size_t(i)])
                                                        : now.embeddings[size_t(i * kHidden)];
            for (int64_t layer = 0; layer < 2; ++layer) {
                const int64_t at = now.slots[size_t(i)] * 2;
                attention.kv[layer].k.as<float>()[at] = key + float(1000 * layer);
                attention.kv[layer].v.as<float>()[at] = float(now.positions[size_t(i)]);
            }
        }
        read_visible(attention, &now);
        CHECK_EQ(output->logits.size(0), int64_t(now.output_rows.size()));
        for (size_t r = 0; r < now.output_rows.size(); ++r) {
            float *row = output->logits.as<float>() + int64_t(r) * kVocabulary;
            std::fill(row, row + kVocabulary, 0.0f);
            const Ints &from = input.token_ids.defined() ? now.tokens : now.positions;
            row[(from[size_t(now.output_rows[r])] + 1) % kVocabulary] = 1.0f;
        }
        seen.push_back(now);
        if (seen.size() == lost_forward) {
            std::fill_n(output->logits.as<float>(), output->logits.elements(), NAN);
        }
        if (inspect) {
            inspect();
        }
        require(--forwards_until_failure != 0, "the fake forward failed");
    }

    std::vector<std::string> events;
    std::vector<Seen> seen;
    std::function<void()> inspect; // called at the end of a forward
    int forwards_until_failure = 0;
    size_t lost_forward = 0; // number of the forward that returns NaN; 0: none
    bool weights_missing = false;

private:
    static Seen read(const models::ModelInput &input, const models::AttentionMetadata &attention) {
        Seen now;
        now.tokens = list_of<int64_t>(input.token_ids);
        now.positions = list_of<int64_t>(input.positions);
        now.output_rows = list_of<int32_t>(input.output_rows);
        now.slots = list_of<int32_t>(attention.slots);
        now.rows = list_of<int32_t>(attention.lists_of(0).q_rows);
        now.begin = list_of<int32_t>(attention.lists_of(0).begin);
        now.begin_of_layer_1 = list_of<int32_t>(attention.lists_of(1).begin);
        now.shares_lists = &attention.lists_of(0) == &attention.lists_of(1);
        now.end = list_of<int32_t>(attention.lists_of(0).end);
        now.tables = list_of<int32_t>(attention.lists_of(0).tables);
        now.table_shape = attention.lists_of(0).tables.shape();
        now.block_size = attention.lists_of(0).block_size;
        if (input.embeddings.defined()) {
            const float *values = input.embeddings.as<float>();
            now.embeddings.assign(values, values + input.embeddings.elements());
        }
        for (const Ints *list : {&now.positions, &now.slots, &now.rows, &now.begin, &now.end}) {
            CHECK_EQ(int64_t(list->size()), input.n_tokens);
        }
        return now;
    }
    static void read_visible(const models::AttentionMetadata &attention, Seen *now) {
        for (size_t i = 0; i < now->rows.size(); ++i) {
            Ints keys;
            for (int64_t e = now->begin[i]; e < now->end[i]; ++e) {
                const int64_t width = now->table_shape[1];
                const int64_t block =
                    now->tables[size_t(now->rows[i] * width + e / now->block_size)];
                const int64_t slot = block * now->block_size + e % now->block_size;
                keys.push_back(int64_t(attention.kv[0].k.as<float>()[slot * 2]));
            }
            now->visible.push_back(keys);
        }
    }
    static models::ModelSpec spec_of(std::vector<int64_t> windows) {
        models::ModelSpec spec;
        spec.kv = {2, 1, 2, LLAISYS_DTYPE_F32, Tensor::create({1}, LLAISYS_DTYPE_F32)};
        spec.vocabulary = spec.input_vocabulary = kVocabulary;
        spec.hidden_size = kHidden;
        spec.max_positions = 1000;
        spec.windows = std::move(windows);
        return spec;
    }
};

// A step that owns its arrays; empty ones are NULL.
struct Step {
    Ints tokens, positions, seq_ids;
    std::vector<int32_t> n_seq_id;
    std::vector<int8_t> logits;
    std::vector<float> embd;
    std::vector<int32_t> slot_mapping, context_lens, block_tables;
    Ints batch_seq_ids;

    LlaisysStepInput view() const {
        LlaisysStepInput input{};
        input.struct_size = sizeof input;
        input.n_tokens = int32_t(embd.empty() ? tokens.size() : embd.size() / kHidden);
        input.token_ids = or_null(tokens);
        input.embd = or_null(embd);
        input.positions = or_null(positions);
        input.n_seq_id = or_null(n_seq_id);
        input.seq_ids = or_null(seq_ids);
        input.n_seq_ids = int32_t(seq_ids.size());
        input.logits = or_null(logits);
        input.n_seq = int32_t(batch_seq_ids.size());
        input.slot_mapping = or_null(slot_mapping);
        input.context_lens = or_null(context_lens);
        input.batch_seq_ids = or_null(batch_seq_ids);
        input.block_tables = or_null(block_tables);
        input.block_table_width = input.n_seq > 0 ? int32_t(block_tables.size()) / input.n_seq : 0;
        return input;
    }
    template <typename T> static const T *or_null(const std::vector<T> &values) {
        return values.empty() ? nullptr : values.data();
    }
};

struct Rig {
    explicit Rig(int32_t max_ubatch = 512, int64_t window = 0, bool is_block = false)
        : Rig(max_ubatch, std::vector<int64_t>{window, window}, is_block) {}
    Rig(int32_t max_ubatch, std::vector<int64_t> windows, bool is_block)
        : model(std::move(windows)), runner(stream, model, options(max_ubatch, is_block)) {}
    static RunnerOptions options(int32_t max_ubatch, bool is_block) {
        RunnerOptions options;
        options.layout = is_block ? LLAISYS_KV_LAYOUT_BLOCK : LLAISYS_KV_LAYOUT_SLOT;
        options.block_size = 4;
        options.n_slots = 16;
        options.max_positions = 100;
        options.max_ubatch = max_ubatch;
        options.samples_on_cpu = true;
        return options;
    }
    int32_t step(const Step &step) { return runner.step(step.view()); }
    Ints output_ids() const {
        return Ints(runner.output().ids(), runner.output().ids() + runner.output().n_rows());
    }
    // State that a failed step must not change.
    std::string state() const {
        const LlaisysKvStats stats = runner.kv_stats();
        return text(runner.kv_dump(), stats.used_slots, ' ', stats.peak_used_slots, ' ',
                    stats.n_sequences);
    }

    device::Stream stream{LLAISYS_DEVICE_CPU, 0, 1};
    FakeModel model;
    ModelRunner runner;
};

inline Step tokens(Ints ids) {
    Step step;
    step.tokens = std::move(ids);
    return step;
}

} // namespace fake
