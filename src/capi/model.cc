// Model handles and steps. The KV cache calls are in model_kv.cc.
#include "base/graph_rows.hpp"
#include "capi/model_handle.hpp"

#include <algorithm>
#include <vector>

using namespace llaisys;
using namespace llaisys::capi;

namespace {

constexpr int32_t kMaxHiddenLayers = 64;
constexpr int32_t kMaxLoras = 1024;

void check_lora_sizes(int32_t max_loras, int32_t max_rank) {
    require(max_loras >= 0 && max_loras <= kMaxLoras, "max_loras must be in [0, ", kMaxLoras,
            "], got ", max_loras);
    require(max_loras == 0 || (max_rank >= 1 && max_rank <= ops::kMaxLoraRank),
            "max_rank must be in [1, ", ops::kMaxLoraRank, "], got ", max_rank);
}

void set_no_slot_error() {
    set_last_error(LLAISYS_ERROR_MEMORY, "the KV cache has no free slot for this step");
}

// Runs a part of a step. Every rank rejects an invalid input alike; any other failure aborts the
// group, whose ranks would wait for this one.
template <typename Body> void abort_if_ranks_differ(const LlaisysModel *model, const Body &body) {
    try {
        body();
    } catch (const Error &error) {
        if (error.status() != LLAISYS_ERROR_INVALID) {
            model->abort_groups(text("rank ", model->params.get().rank, ": ", error.what()));
        }
        throw;
    }
}

// Runs a step. On any result except 0 there are no output rows and an error text is set.
int32_t run_step(LlaisysModel *model, const LlaisysStepInput &input) {
    int32_t code = LLAISYS_OK;
    abort_if_ranks_differ(model, [&] {
        code = model->runner().step(input);
        model->check_groups();
    });
    if (code == LLAISYS_DECODE_NO_KV_SLOT) {
        set_no_slot_error();
    }
    return code;
}

const LlaisysStepInput &checked(const LlaisysStepInput *input) {
    sized(input, "input");
    require(input->embd_size >= 0, "input.embd_size must not be negative, got ", input->embd_size);
    return *input;
}

} // namespace

LlaisysModel *llaisysModelCreate(const LlaisysModelCreateParams *params) {
    LlaisysModel *model = nullptr;
    guard([&] {
        check_create_params(*not_null(params, "params"));
        model = new LlaisysModel(*params);
    });
    return model;
}

void llaisysModelDestroy(LlaisysModel *model) { delete model; }

LlaisysModelType llaisysModelType(const LlaisysModel *model) {
    return model != nullptr ? model->model->spec().type : LLAISYS_MODEL_TYPE_UNKNOWN;
}

int32_t llaisysModelParams(const LlaisysModel *model, LlaisysModelCreateParams *params) {
    return guard([&] { *not_null(params, "params") = not_null(model, "model")->params.get(); });
}

void *llaisysModelWeights(LlaisysModel *model) {
    if (model == nullptr) {
        return nullptr;
    }
    model->pipeline.wait();
    return model->model->weights();
}

int32_t llaisysModelReplaceWeight(LlaisysModel *model, const char *field, int32_t layer,
                                  llaisysTensor_t tensor) {
    return guard([&] {
        not_null(model, "model")->pipeline.wait();
        model->model->replace_weight(model->stream, not_null(field, "field"), layer, tensor);
    });
}

int32_t llaisysModelReserveLora(LlaisysModel *model, int32_t max_loras, int32_t max_rank) {
    return guard([&] {
        not_null(model, "model");
        check_lora_sizes(max_loras, max_rank);
        model->runner().reserve_lora(max_loras, max_rank);
    });
}

int32_t llaisysModelLoraBytes(const LlaisysModelCreateParams *params, int32_t max_loras,
                              int32_t max_rank, int64_t *bytes) {
    return guard([&] {
        check_create_params(*not_null(params, "params"));
        check_lora_sizes(max_loras, max_rank);
        *not_null(bytes, "bytes") = lora_bytes(*params, max_loras, max_rank);
    });
}

int32_t llaisysModelScratchBytes(const LlaisysModelCreateParams *params, int32_t n_outputs,
                                 int32_t max_loras, int32_t max_rank, int64_t *bytes) {
    return guard([&] {
        check_create_params(*not_null(params, "params"));
        require(n_outputs >= 0, "n_outputs must not be negative, got ", n_outputs);
        check_lora_sizes(max_loras, max_rank);
        *not_null(bytes, "bytes") = scratch_bytes(*params, n_outputs, max_loras, max_rank);
    });
}

int32_t llaisysModelSetLora(LlaisysModel *model, int32_t slot, const char *field, int32_t layer,
                            llaisysTensor_t a, llaisysTensor_t b, float scale) {
    return guard([&] {
        not_null(model, "model")->pipeline.wait();
        model->model->set_lora(model->stream, slot, not_null(field, "field"), layer,
                               tensor_of(a, "a"), tensor_of(b, "b"), scale);
    });
}

int32_t llaisysModelClearLora(LlaisysModel *model, int32_t slot) {
    return guard([&] {
        not_null(model, "model")->pipeline.wait();
        model->model->clear_lora(model->stream, slot);
    });
}

int32_t llaisysModelStep(LlaisysModel *model, const LlaisysStepInput *input) {
    return guard([&] {
        not_null(model, "model")->runner().clear_output(); // whatever is refused below
        return run_step(model, checked(input));
    });
}

int32_t llaisysModelDecode(LlaisysModel *model, LlaisysBatch batch) {
    return guard([&] {
        not_null(model, "model")->runner().clear_output(); // whatever is refused below
        require(batch.n_tokens >= 1, "n_tokens must be at least 1, got ", batch.n_tokens);
        // The runner rejects a batch that can never fit without reading its arrays.
        const bool is_read = batch.n_tokens <= model->params.get().kv_cache_capacity_tokens;
        std::vector<int64_t> seq_ids; // flat
        for (int32_t i = 0; is_read && batch.seq_id != nullptr && i < batch.n_tokens; ++i) {
            const int32_t count = batch.n_seq_id != nullptr ? batch.n_seq_id[i] : 1;
            require(count >= 1 && count <= (1 << 20), "n_seq_id[", i, "] must be in [1, ", 1 << 20,
                    "], got ", count);
            require(batch.seq_id[i] != nullptr, "seq_id[", i, "] is NULL");
            seq_ids.insert(seq_ids.end(), batch.seq_id[i], batch.seq_id[i] + count);
        }
        LlaisysStepInput input{};
        input.struct_size = sizeof input;
        input.n_tokens = batch.n_tokens;
        input.token_ids = batch.token;
        input.embd = batch.embd;
        input.positions = batch.pos;
        input.n_seq_id = batch.n_seq_id;
        input.seq_ids = batch.seq_id != nullptr ? seq_ids.data() : nullptr;
        input.n_seq_ids = int32_t(seq_ids.size());
        input.logits = batch.logits;
        return run_step(model, input);
    });
}

int32_t llaisysModelLaunch(LlaisysModel *model, const LlaisysStepInput *input,
                           const LlaisysSamplingMetadata *sampling, int64_t *ticket) {
    return guard([&] {
        not_null(model, "model");
        model->require_last_stage();
        int64_t &launched = *not_null(ticket, "ticket"); // before the step is in flight
        launched = model->pipeline.launch(checked(input), sized(sampling, "sampling"));
    });
}

int32_t llaisysModelCollect(LlaisysModel *model, int64_t ticket, int32_t *ids) {
    return guard([&] {
        not_null(model, "model");
        int32_t code = LLAISYS_DECODE_OK;
        abort_if_ranks_differ(model, [&] {
            code = model->pipeline.collect(ticket, not_null(ids, "ids"));
            model->check_groups();
        });
        if (code == LLAISYS_DECODE_NO_KV_SLOT) {
            set_no_slot_error();
        } else if (code == LLAISYS_DECODE_ABORTED) {
            set_last_error(LLAISYS_ERROR_INTERNAL, "not run: the previous step failed");
        }
        return code;
    });
}

int32_t llaisysModelCollectedLogprobs(LlaisysModel *model, int32_t i, LlaisysLogprobs *logprobs) {
    return guard(
        [&] { *not_null(logprobs, "logprobs") = not_null(model, "model")->pipeline.logprobs(i); });
}

int32_t llaisysModelNOutputs(LlaisysModel *model) {
    return model != nullptr ? model->runner().output().n_rows() : -1;
}

const int32_t *llaisysModelOutputIds(LlaisysModel *model) {
    return model != nullptr ? model->runner().output().ids() : nullptr;
}

float *llaisysModelGetLogits(LlaisysModel *model) { return llaisysModelGetLogitsIth(model, 0); }

float *llaisysModelGetLogitsIth(LlaisysModel *model, int32_t i) {
    if (model == nullptr || i < 0 || i >= model->runner().output().n_rows()) {
        return nullptr;
    }
    float *row = nullptr;
    guard([&] {
        float *rows = model->runner().host_rows();
        model->check_groups();
        row = rows + i * model->runner().output().row_size();
    });
    return row;
}

int32_t llaisysModelKeepHidden(LlaisysModel *model, const int32_t *layers, int32_t n) {
    return guard([&] {
        not_null(model, "model");
        require(n >= 0 && n <= kMaxHiddenLayers, "n must be in [0, ", kMaxHiddenLayers, "], got ",
                n);
        require(n == 0 || layers != nullptr, "layers is NULL");
        model->runner().set_aux_hidden_layers({layers, layers + n});
    });
}

const float *llaisysModelGetHidden(LlaisysModel *model) {
    const float *hidden = nullptr;
    if (model != nullptr) {
        guard([&] { hidden = model->runner().host_hidden(); });
    }
    return hidden;
}

int32_t llaisysModelSample(LlaisysModel *model, const LlaisysSamplingMetadata *sampling,
                           int32_t *ids) {
    return guard([&] {
        not_null(model, "model")->require_last_stage();
        model->runner().sample(sized(sampling, "sampling"), not_null(ids, "ids"));
        model->check_groups();
    });
}

int32_t llaisysGraphRows(int32_t rows, int32_t has_drafts) {
    return int32_t(graph_rows(rows, has_drafts != 0));
}

int32_t llaisysModelLogprobs(LlaisysModel *model, int32_t i, LlaisysLogprobs *logprobs) {
    return guard([&] {
        *not_null(logprobs, "logprobs") = not_null(model, "model")->runner().sampler().logprobs(i);
    });
}

int32_t llaisysModelSampleCounts(LlaisysModel *model, int64_t *on_device, int64_t *on_host) {
    return guard([&] {
        not_null(on_device, "on_device");
        not_null(on_host, "on_host");
        const runtime::ModelRunner::Samples &samples = not_null(model, "model")->runner().samples();
        *on_device = samples.on_device;
        *on_host = samples.on_host;
    });
}

int32_t llaisysModelSamplerReset(LlaisysModel *model, int64_t seq_id, const int64_t *prompt,
                                 int32_t n_prompt) {
    return guard(
        [&] { not_null(model, "model")->runner().sampler().reset(seq_id, prompt, n_prompt); });
}

int32_t llaisysModelSamplerAccept(LlaisysModel *model, int64_t seq_id, const int64_t *tokens,
                                  int32_t n_tokens) {
    return guard(
        [&] { not_null(model, "model")->runner().sampler().accept(seq_id, tokens, n_tokens); });
}

int32_t llaisysModelSamplerForget(LlaisysModel *model, int64_t seq_id) {
    return guard([&] { not_null(model, "model")->runner().sampler().forget(seq_id); });
}

int32_t llaisysModelPooled(LlaisysModel *model, int64_t seq_id, float *vector, int64_t n) {
    return guard([&] {
        not_null(model, "model")->runner().pooler().read(seq_id, not_null(vector, "vector"), n);
    });
}

int32_t llaisysModelPoolForget(LlaisysModel *model, int64_t seq_id) {
    return guard([&] { not_null(model, "model")->runner().pooler().forget(seq_id); });
}

int32_t llaisysModelProfile(LlaisysModel *model, LlaisysProfile *profile, int32_t reset) {
    return guard([&] {
        sized(profile, "profile") = not_null(model, "model")->runner().profile().times();
        for (parallel::ProcessGroup *group : {model->group.get(), model->stages.get()}) {
            if (group == nullptr) {
                continue;
            }
            const parallel::GroupTimes &times = group->times(); // part of forward
            profile->collective.seconds += times.seconds;
            profile->collective.count += times.count;
            profile->forward.seconds = std::max(0.0, profile->forward.seconds - times.seconds);
            if (reset != 0) {
                group->reset_times();
            }
        }
        if (reset != 0) {
            model->runner().profile().reset();
        }
    });
}
