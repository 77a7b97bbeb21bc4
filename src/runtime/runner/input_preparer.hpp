// Turns a step as the caller gave it into one that is complete and checked: every token has an id or
// an embedding, a position, its sequences; the output rows are listed; the step is cut into
// micro-batches.
#pragma once

#include "llaisys/runtime/infer_types.h"
#include "runtime/kv_cache/kv_cache.hpp"

#include <unordered_map>
#include <vector>

namespace llaisys::runtime {

// A complete step. The vectors are scratch that the preparer reuses; token_ids and embd are the
// caller's. n: tokens.
struct PreparedStep {
    int32_t n_tokens = 0;
    const int64_t *token_ids = nullptr; // [n], null when embd is given, but to a draft head
    const float *embd = nullptr;        // [n, embd_size]
    int64_t embd_size = 0;
    std::vector<int64_t> positions;   // [n]
    std::vector<int32_t> seq_offsets; // [n + 1]
    std::vector<int64_t> seq_ids;     // [seq_offsets[n]], each token's rising
    std::vector<int32_t> outputs;     // tokens whose logits are wanted, rising
    std::vector<int32_t> pooled;      // tokens whose hidden states are, rising
    const uint8_t *pooling = nullptr; // [n]: LlaisysPooling of those
};

// Tokens [first, first + n) of a step, outputs [first_output, first_output + n_outputs), and the same
// of the pooled ones.
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
    struct Limits {
        int64_t vocabulary; // of the tokens that go in
        int64_t max_positions;
        int32_t max_ubatch; // tokens
        int64_t hidden_size;
        int64_t feature_size; // as Model::feature_size
    };

    explicit InputPreparer(const Limits &limits) : limits_(limits) {}

    // Throws INVALID with field, index, value and limit. `cells` are the books of the SLOT layout:
    // they give positions that are missing, and a token must come after all that its sequences
    // hold; null in the BLOCK layout, where positions are required. In both the tokens of a
    // sequence come in rising order of position. Valid until the next call.
    const PreparedStep &prepare(const LlaisysStepInput &input, const KvCache *cells);

    // In order, each of at most max_ubatch tokens. Valid until the next call.
    const std::vector<UbatchRange> &split(const PreparedStep &step);

private:
    void take_tokens(const LlaisysStepInput &input);
    void take_sequences(const LlaisysStepInput &input);
    void take_positions(const LlaisysStepInput &input, const KvCache *cells);
    void take_outputs(const LlaisysStepInput &input);
    void take_pooled(const LlaisysStepInput &input);

    Limits limits_;
    PreparedStep step_;
    std::vector<UbatchRange> ranges_;
    std::unordered_map<int64_t, int64_t> last_position_; // of each sequence seen in this step
};

} // namespace llaisys::runtime
