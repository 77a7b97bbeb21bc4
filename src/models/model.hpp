// Interface between the runner and a model: sizes, weights and forward.
//
// A model turns tokens into logits. It is independent of the KV layout, allocates no KV cache,
// samples nothing and has no state between steps except its weights.
#pragma once

#include "device/runtime.hpp"
#include "llaisys/models/model.h"
#include "ops/attention/op.hpp"
#include "ops/lora/op.hpp"
#include "parallel/process_group.hpp"
#include "runtime/workspace/workspace.hpp"
#include "tensor/tensor.hpp"

#include <memory>
#include <utility>
#include <vector>

namespace llaisys::models {

// Device and process groups of a model.
struct ModelPlacement {
    DeviceType device = LLAISYS_DEVICE_CPU;
    int device_id = 0;
    std::shared_ptr<const parallel::ProcessGroup> group; // tensor-parallel ranks; never null
    bool vocab_parallel_head = false;                    // the head is sharded by vocabulary
    bool replicate_kv_heads = false;                     // ranks may outnumber key/value heads
    // All ranks of a pipeline; null: one stage. The ranks of a stage are adjacent. Rank 0 is in the
    // last stage, which samples; the hidden states of a step move to lower ranks.
    std::shared_ptr<const parallel::ProcessGroup> stages;
    bool is_described = false; // the model only states sizes: no device memory

    bool is_last_stage() const { return !stages || stages->rank() < group->size(); }
    bool is_first_stage() const {
        return !stages || stages->rank() + group->size() >= stages->size();
    }
};

// Shape of the KV cache of a model.
struct KvSpec {
    int64_t n_layers = 0;
    int64_t n_heads = 0; // key/value heads of this rank
    int64_t head_dim = 0;
    DType dtype = LLAISYS_DTYPE_INVALID; // default; the caller may choose another
    // f32 [d / 2] or [n_layers, d / 2]: rotates the last d values of keys in a context shift
    Tensor inv_freq;
    // 0: values have a tensor of their own. Otherwise they are the first value_dim of each key.
    int64_t value_dim = 0;
};

// Properties of a model, fixed at construction.
struct ModelSpec {
    LlaisysModelType type = LLAISYS_MODEL_TYPE_UNKNOWN;
    KvSpec kv;
    int64_t vocabulary = 0;       // of the logits
    int64_t input_vocabulary = 0; // of the tokens of a step
    int64_t hidden_size = 0;
    // Draft head: its input is token ids and embeddings of hidden_size or of this size. 0: any
    // other model, whose input is token ids or embeddings.
    int64_t feature_size = 0;
    int64_t max_positions = 0;
    int64_t token_types = 0;       // values of ModelInput::token_types; 0: not used
    bool is_bidirectional = false; // a token sees all tokens of its sequence
    std::vector<int64_t> windows;  // attention window of each layer, [kv.n_layers]; 0: none
};

// One micro-batch: n tokens, logits of r of them, hidden states of h of them. A tensor that does
// not apply has no storage.
struct ModelInput {
    int64_t n_tokens = 0;
    Tensor token_ids;   // i64 [n]; a model other than a draft head has these or embeddings
    Tensor embeddings;  // f32 [n, hidden size, or feature size]
    Tensor positions;   // i64 [n]
    Tensor token_types; // i64 [n], of a model with token types
    Tensor output_rows; // i32 [r]: tokens with logits, ascending
    Tensor hidden_rows; // i64 [h]: tokens with hidden states, ascending
    // Set when r > 0 and, once the last layer has stored its keys and values, only output rows are
    // needed. A model may then drop the other rows.
    Tensor last_rows;        // i64 [r]: output_rows
    Tensor last_row_indices; // i32 [r]: 0, 1, ...: their rows after that
    // Rows with a LoRA adapter; without storage when no row has one.
    ops::LoraRows lora;
    ops::LoraRows last_lora; // those of last_rows
};

// Slots for the keys and values of a micro-batch, and the cache entries visible to each token.
struct AttentionMetadata {
    Tensor slots;                               // i32 [n]
    const ops::AttentionLists *lists = nullptr; // one for each distinct window
    const int32_t *list_of_layer = nullptr;     // [n_layers]
    const ops::KvLayer *kv = nullptr;           // [n_layers]

    const ops::AttentionLists &lists_of(size_t layer) const { return lists[list_of_layer[layer]]; }
};

struct ForwardOutput {
    // Buffers of the caller, written by the model; without storage when empty.
    Tensor logits;     // f32 [r, vocabulary]
    Tensor hidden;     // f32 [h, hidden size], after the last norm
    Tensor aux_hidden; // f32 [n, aux_hidden_size()]
};

class Model {
public:
    explicit Model(ModelSpec spec) : spec_(std::move(spec)) {}
    virtual ~Model() = default;
    Model(const Model &) = delete;
    Model &operator=(const Model &) = delete;

    const ModelSpec &spec() const { return spec_; }

    // Values per token in ForwardOutput::aux_hidden.
    virtual int64_t aux_hidden_size() const { return 0; }
    // See llaisysModelKeepHidden; throws for an unknown layer or an unsupported model.
    virtual void set_aux_hidden_layers(const std::vector<int32_t> &) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "only decoders support hidden states of layers");
    }

    // LoRA; see llaisysModelReserveLora. Slots reserved; 0: none.
    virtual int64_t lora_slots() const { return 0; }
    // Largest rank of each slot in any product, [lora_slots()]; 0: empty.
    virtual const int32_t *lora_ranks() const { return nullptr; }
    virtual int64_t lora_bytes(int64_t, int64_t) const { no_lora(); }
    // stream null: only workspace_bytes() is used afterwards.
    virtual void reserve_lora(const device::Stream *, int64_t, int64_t) { no_lora(); }
    virtual void set_lora(const device::Stream &, int64_t, const char *, int64_t, const Tensor &,
                          const Tensor &, float) {
        no_lora();
    }
    virtual void clear_lora(const device::Stream &, int64_t) { no_lora(); }

    // The public slot table of this model type.
    virtual void *weights() = 0;
    // Takes ownership of the handle or throws; may pack the values at once.
    virtual void replace_weight(const device::Stream &stream, const char *field, int layer,
                                llaisysTensor_t handle) = 0;
    // Packs weights whose slots changed; throws naming a missing or invalid weight.
    virtual void prepare_weights(const device::Stream &stream) = 0;

    // Changes when the memory of the weights changes.
    virtual uint64_t weights_version() const { return 0; }

    // Workspace bytes of a forward of this size.
    virtual int64_t workspace_bytes(int64_t n_tokens, int64_t n_outputs) const = 0;
    virtual void forward(const device::Stream &stream, runtime::Workspace &workspace,
                         const ModelInput &input, const AttentionMetadata &attention,
                         ForwardOutput *output) = 0;

private:
    [[noreturn]] static void no_lora() {
        fail(LLAISYS_ERROR_UNSUPPORTED, "only decoders support LoRA adapters");
    }

    ModelSpec spec_;
};

// Throws for an unknown type or invalid hyper-parameters. `meta` is the struct of the type and
// describes the unsharded model.
std::unique_ptr<Model> create_model(LlaisysModelType type, const void *meta,
                                    const ModelPlacement &placement);

} // namespace llaisys::models
