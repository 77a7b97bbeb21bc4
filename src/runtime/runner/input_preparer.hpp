// Validates a step, fills in missing positions and sequences, lists output rows and splits the step
// into micro-batches.
#pragma once

#include "llaisys/runtime/infer_types.h"
#include "models/model.hpp"
#include "runtime/kv_cache/kv_cache.hpp"

#include <unordered_map>
#include <vector>

namespace llaisys::runtime {

// A validated step of n tokens. The preparer owns and reuses the vectors; the caller owns token_ids
// and embd.
struct PreparedStep {
    int32_t n_tokens = 0;
    const int64_t *token_ids = nullptr; // [n]; null with embd, except for a draft head
    const float *embd = nullptr;        // [n, embd_size]
    int64_t embd_size = 0;
    std::vector<int64_t> positions;       // [n]
    std::vector<int32_t> seq_offsets;     // [n + 1]
    std::vector<int64_t> seq_ids;         // [seq_offsets[n]], ascending per token
    std::vector<int32_t> outputs;         // tokens with logits, ascending
    std::vector<int32_t> pooled;          // tokens to pool, ascending
    const uint8_t *pooling = nullptr;     // [n]: LlaisysPooling
    const int32_t *lora_slots = nullptr;  // [n]; null: no token has an adapter
    const uint8_t *token_types = nullptr; // [n]; null: 0
};

// A micro-batch: ranges of a step's tokens, outputs and pooled tokens.
struct UbatchRange {
    int32_t first = 0;
    int32_t n = 0;
    int32_t first_output = 0;
    int32_t n_outputs = 0;
    int32_t first_pooled = 0;
    int32_t n_pooled = 0;
};

class InputPreparer {
public:
    // max_ubatch: tokens of a micro-batch.
    InputPreparer(const models::ModelSpec &spec, int64_t max_positions, int32_t max_ubatch)
        : spec_(spec), max_positions_(max_positions), max_ubatch_(max_ubatch) {}

    // Throws INVALID with field, index, value and limit. `cells`: the SLOT metadata, from which
    // missing positions are derived; a token must follow all cells of its sequences. Null in the
    // BLOCK layout, where positions are required. Positions of a sequence must ascend. The result
    // is valid until the next call.
    const PreparedStep &prepare(const LlaisysStepInput &input, const KvCache *cells);

    // LoRA slots of the model; lora_slots of a step are in [-1, n).
    void set_lora_slots(int64_t n) { n_lora_slots_ = n; }

    // Micro-batches of at most max_ubatch tokens, in order. Valid until the next call. Throws INVALID
    // when one has no room for a sequence that must be whole.
    const std::vector<UbatchRange> &split(const PreparedStep &step);

private:
    void prepare_tokens(const LlaisysStepInput &input);
    void prepare_sequences(const LlaisysStepInput &input);
    void prepare_positions(const LlaisysStepInput &input, const KvCache *cells);
    void prepare_outputs(const LlaisysStepInput &input);
    void prepare_pooled(const LlaisysStepInput &input);
    void prepare_lora(const LlaisysStepInput &input);
    void prepare_types(const LlaisysStepInput &input);
    void check_whole_sequences();
    // End of the micro-batch that begins at `first`.
    int32_t end_of_ubatch(const PreparedStep &step, int32_t first) const;

    const models::ModelSpec &spec_;
    int64_t max_positions_;
    int32_t max_ubatch_;
    int64_t n_lora_slots_ = 0;
    PreparedStep step_;
    std::vector<UbatchRange> ranges_;
    std::unordered_map<int64_t, int64_t> last_position_; // of each sequence of this step
};

} // namespace llaisys::runtime
