// What the runner knows of a model: its sizes, its weights, and forward.
//
// A model turns tokens into logits. It does not know which KV layout it runs on, allocates no KV,
// samples nothing and keeps no state between steps but its weights.
#pragma once

#include "device/runtime.hpp"
#include "llaisys/models/model.h"
#include "ops/attention/op.hpp"
#include "parallel/process_group.hpp"
#include "runtime/workspace/workspace.hpp"
#include "tensor/tensor.hpp"

#include <memory>
#include <utility>
#include <vector>

namespace llaisys::models {

// Where a model runs, and the ranks that it shares its layers with.
struct ModelSite {
    DeviceType device = LLAISYS_DEVICE_CPU;
    int device_id = 0;
    std::shared_ptr<const parallel::ProcessGroup> group; // never null; of one: the whole model
    bool vocab_parallel_head = false;                    // each rank has its rows of the head
    bool replicate_kv_heads = false;                     // ranks may outnumber key/value heads
};

// What the KV cache must hold for a model.
struct KvSpec {
    int64_t n_layers = 0;
    int64_t n_heads = 0; // key/value heads of this rank
    int64_t head_dim = 0;
    DType dtype = LLAISYS_DTYPE_INVALID; // unless the caller asks for another
    Tensor inv_freq;                     // f32 [head_dim / 2]: rotates keys when positions move
};

// What a model is; fixed when it is made.
struct ModelSpec {
    LlaisysModelType type = LLAISYS_MODEL_TYPE_UNKNOWN;
    KvSpec kv;
    int64_t vocabulary = 0;       // of the logits
    int64_t input_vocabulary = 0; // of the tokens of a step
    int64_t hidden_size = 0;
    // Of a draft head, which takes token ids and embeddings both, these of hidden_size or of this
    // size; 0: a model that takes one or the other.
    int64_t feature_size = 0;
    int64_t max_positions = 0;
    std::vector<int64_t> windows; // of the attention of each layer, [kv.n_layers]; 0: none
};

// One micro-batch: n tokens, r of which get logits; of h the hidden states are wanted.
struct ModelInput {
    int64_t n_tokens = 0;
    Tensor token_ids;   // i64 [n]; not defined when embeddings are given, but to a draft head
    Tensor embeddings;  // f32 [n, hidden size, or feature size]; defined when token_ids is not
    Tensor positions;   // i64 [n]
    Tensor output_rows; // i32 [r]: tokens whose logits are wanted, rising; not defined when r = 0
    Tensor hidden_rows; // i64 [h]: the same for the hidden states
    // Where only tokens with logits matter behind the keys and values of the last layer, a model may go on with
    // these alone. Defined then, and when r > 0:
    Tensor last_rows;   // i64 [r]: output_rows again
    Tensor last_places; // i32 [r]: 0, 1, .., where they are from then on
};

// Where this micro-batch writes its keys and values, and what each token sees of the cache.
struct AttentionMetadata {
    Tensor slots;                               // i32 [n]
    const ops::AttentionLists *lists = nullptr; // one for each distinct window
    const int32_t *list_of_layer = nullptr;     // [n_layers]
    const ops::KvLayer *kv = nullptr;           // [n_layers]

    const ops::AttentionLists &lists_of(size_t layer) const { return lists[list_of_layer[layer]]; }
};

struct ForwardOutput {
    Tensor logits; // f32 [r, vocabulary], given by the caller, filled by the model; r may be 0
    Tensor hidden; // f32 [h, hidden size], after the last norm; the same, not defined when h = 0
    Tensor kept;   // f32 [n, kept_hidden()], the same; not defined when that is 0
};

class Model {
public:
    explicit Model(ModelSpec spec) : spec_(std::move(spec)) {}
    virtual ~Model() = default;
    Model(const Model &) = delete;
    Model &operator=(const Model &) = delete;

    const ModelSpec &spec() const { return spec_; }

    // Numbers of each token that forward leaves in ForwardOutput::kept.
    virtual int64_t kept_hidden() const { return 0; }
    // See llaisysModelKeepHidden; throws when the model has no such layer, or keeps none.
    virtual void keep_hidden(const std::vector<int32_t> &) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "hidden states can be kept of decoders only");
    }

    // The public slot table of this model type.
    virtual void *weights() = 0;
    // Takes the handle over or throws; may lay the values out anew at once.
    virtual void replace_weight(const device::Stream &stream, const char *field, int layer,
                                llaisysTensor_t handle) = 0;
    // Brings what forward uses in line with the slots; throws naming what is missing or wrong.
    virtual void prepare_weights(const device::Stream &stream) = 0;

    // Changes when forward reads its weights from other memory than before.
    virtual uint64_t weights_version() const { return 0; }

    // Workspace that a forward of this size takes.
    virtual int64_t workspace_bytes(int64_t n_tokens, int64_t n_outputs) const = 0;
    virtual void forward(const device::Stream &stream, runtime::Workspace &workspace,
                         const ModelInput &input, const AttentionMetadata &attention,
                         ForwardOutput *output) = 0;

private:
    ModelSpec spec_;
};

} // namespace llaisys::models
