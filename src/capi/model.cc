#include "capi/guard.hpp"
#include "models/registry.hpp"
#include "parallel/process_group.hpp"
#include "runtime/runner/step_pipeline.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

using namespace llaisys;
using namespace llaisys::capi;

// The parameters that are in force, with strings and arrays of its own.
class OwnedParams {
public:
    explicit OwnedParams(const LlaisysModelCreateParams &params) : params_(params) {
        device_ids_.assign(1, 0);
        if (params.ndevice > 0) {
            device_ids_.assign(params.device_ids, params.device_ids + params.ndevice);
        }
        params_.meta = nullptr;
        params_.device_ids = device_ids_.data();
        params_.ndevice = int32_t(device_ids_.size());
        strings_.reserve(5); // pointers into it must stay
        params_.distributed_executor_backend = keep(params.distributed_executor_backend, "uni");
        params_.distributed_backend = keep(params.distributed_backend, "");
        params_.master_addr = keep(params.master_addr, "");
        params_.init_method = keep(params.init_method, "");
        params_.tp_group_name = keep(params.tp_group_name, "");
    }
    OwnedParams(const OwnedParams &) = delete;
    OwnedParams &operator=(const OwnedParams &) = delete;
    LlaisysModelCreateParams &get() { return params_; }
    const LlaisysModelCreateParams &get() const { return params_; }

private:
    const char *keep(const char *given, const char *otherwise) {
        strings_.emplace_back(given != nullptr ? given : otherwise);
        return strings_.back().c_str();
    }

    LlaisysModelCreateParams params_;
    std::vector<int32_t> device_ids_;
    std::vector<std::string> strings_;
};

struct LlaisysModel {
    explicit LlaisysModel(const LlaisysModelCreateParams &given)
        : params(given), stream(given.device, device_of(params.get()), given.n_threads),
          group(group_of(params.get())),
          model(models::create_model(given.model_type, given.meta,
                                     {stream.type(), stream.device_id(), group,
                                      given.vocab_parallel_head != 0,
                                      given.replicate_kv_heads != 0})),
          own_runner(stream, *model, complete(&params.get(), *model)),
          pipeline(stream, own_runner) {}

    static int32_t device_of(const LlaisysModelCreateParams &params) {
        return params.device_ids[params.local_rank];
    }
    // The ranks that hold the other parts of the model.
    static std::shared_ptr<parallel::ProcessGroup> group_of(const LlaisysModelCreateParams &params);
    // When no launched step runs any more: for every call but Launch and Collect.
    runtime::ModelRunner &runner() {
        pipeline.wait();
        return own_runner;
    }
    // Fills the defaults in and gives what the runner needs of them.
    static runtime::RunnerOptions complete(LlaisysModelCreateParams *params,
                                           const models::Model &model);

    OwnedParams params;
    device::Stream stream;
    std::shared_ptr<parallel::ProcessGroup> group;
    std::unique_ptr<models::Model> model;
    runtime::ModelRunner own_runner;
    runtime::StepPipeline pipeline;
};

namespace {

constexpr int32_t kDefaultBlockSize = 16;
constexpr int32_t kDefaultBatchTokens = 512;
constexpr int32_t kMaxRanks = 64;
constexpr int32_t kMaxKept = 64;                // hidden states of a token
constexpr int64_t kMaxSlots = int64_t(1) << 25; // the books of the cache are kept for every slot

std::string text_or(const char *given, const char *otherwise) {
    return given != nullptr && *given != '\0' ? given : otherwise;
}

void check_params(const LlaisysModelCreateParams &params) {
    require(params.struct_size == sizeof params, "params.struct_size must be ", sizeof params,
            ", got ", params.struct_size);
    require(params.ndevice >= 0 && params.ndevice <= 1024,
            "params.ndevice must be in [0, 1024], got ", params.ndevice);
    require(params.ndevice == 0 || params.device_ids != nullptr, "params.device_ids is NULL");
    require(params.kv_cache_layout == LLAISYS_KV_LAYOUT_SLOT ||
                params.kv_cache_layout == LLAISYS_KV_LAYOUT_BLOCK,
            "params.kv_cache_layout must be slot (0) or block (1), got ", params.kv_cache_layout);
    require(params.kv_cache_block_size >= 0 && params.kv_cache_block_size <= 4096,
            "params.kv_cache_block_size must be in [0, 4096], got ", params.kv_cache_block_size);
    require(params.max_model_len >= 0, "params.max_model_len must not be negative, got ",
            params.max_model_len);
    require(params.kv_cache_capacity_tokens >= 0,
            "params.kv_cache_capacity_tokens must not be negative, got ",
            params.kv_cache_capacity_tokens);
    require(params.max_batch_tokens >= 0, "params.max_batch_tokens must not be negative, got ",
            params.max_batch_tokens);
    require(params.n_threads >= 0, "params.n_threads must not be negative, got ", params.n_threads);
    require(params.pipeline_parallel_size >= 0 && params.pipeline_parallel_size <= 1,
            "params.pipeline_parallel_size must be 0 or 1, got ", params.pipeline_parallel_size);
    require(params.local_rank >= 0 && params.local_rank < std::max(1, params.ndevice),
            "params.local_rank must be in [0, ", std::max(1, params.ndevice), "), got ",
            params.local_rank);
    require(params.world_size >= 0 && params.world_size <= 1024,
            "params.world_size must be in [0, 1024], got ", params.world_size);
    require(params.rank >= 0 && params.rank < std::max(1, params.world_size),
            "params.rank must be in [0, ", std::max(1, params.world_size), "), got ", params.rank);
    require(
        params.kv_cache_dtype == LLAISYS_DTYPE_INVALID || ops::is_kv_dtype(params.kv_cache_dtype),
        "params.kv_cache_dtype must be 0, f32, f16, bf16 or i8, got ", int(params.kv_cache_dtype));
    if (params.kv_cache_dtype == LLAISYS_DTYPE_I8 && params.device != LLAISYS_DEVICE_CPU) {
        fail(LLAISYS_ERROR_UNSUPPORTED,
             "params.kv_cache_dtype must be 0, f32, f16 or bf16 on device ", int(params.device),
             ", got i8, which is built for the CPU alone");
    }
    require(params.tensor_parallel_size >= 0 && params.tensor_parallel_size <= kMaxRanks,
            "params.tensor_parallel_size must be in [0, ", kMaxRanks, "], got ",
            params.tensor_parallel_size);
    require(params.tensor_parallel_size <= 1 || params.world_size == params.tensor_parallel_size,
            "params.world_size must be params.tensor_parallel_size, ", params.tensor_parallel_size,
            ", got ", params.world_size);
    const std::string backend = text_or(params.distributed_executor_backend, "uni");
    if (backend != "uni" && backend != "mp" && backend != "ray") {
        fail(LLAISYS_ERROR_UNSUPPORTED,
             "params.distributed_executor_backend must be 'uni', 'mp' or 'ray', got '", backend,
             "'");
    }
}

void say_no_slot() {
    set_last_error(LLAISYS_ERROR_MEMORY, "the KV cache has no free slot for this step");
}

// A step after which, whatever it returns but 0, there are no rows and there is a text.
// A wrong input is wrong for every rank; after any other failure the others would wait for this one.
int32_t run_step(LlaisysModel *model, const LlaisysStepInput &input) {
    int32_t code = LLAISYS_OK;
    try {
        code = model->runner().step(input);
    } catch (const Error &error) {
        if (error.status() != LLAISYS_ERROR_INVALID) {
            model->group->Abort(text("rank ", model->group->rank(), ": ", error.what()));
        }
        throw;
    }
    if (code == LLAISYS_DECODE_NO_KV_SLOT) {
        say_no_slot();
    }
    return code;
}

const LlaisysStepInput &checked(const LlaisysStepInput *input) {
    not_null(input, "input");
    require(input->struct_size == sizeof *input, "input.struct_size must be ", sizeof *input,
            ", got ", input->struct_size);
    require(input->embd_size >= 0, "input.embd_size must not be negative, got ", input->embd_size);
    return *input;
}

const LlaisysSamplingMetadata &checked(const LlaisysSamplingMetadata *sampling) {
    not_null(sampling, "sampling");
    require(sampling->struct_size == sizeof *sampling, "sampling.struct_size must be ",
            sizeof *sampling, ", got ", sampling->struct_size);
    return *sampling;
}

// Why a KV call was refused, for llaisysLastError.
const char *text_of(int32_t kv_status) {
    switch (kv_status) {
    case LLAISYS_KV_OOM_SLOT:
        return "the KV cache has no free cell";
    case LLAISYS_KV_INVALID_SEQ:
        return "the sequence id is negative or holds no cell";
    case LLAISYS_KV_INVALID_POS:
        return "a position would leave [0, max_model_len)";
    case LLAISYS_KV_EMPTY_RANGE:
        return "p0 >= p1, or no cell of the sequence lies in [p0, p1)";
    default:
        return "the KV cache is not in order";
    }
}

// A KV call of the SLOT layout; body(cells) returns the code.
template <typename Body> int32_t kv_call(LlaisysModel *model, const Body &body) {
    int32_t code = LLAISYS_KV_INTERNAL_ERROR;
    const int32_t status = guard([&] {
        runtime::KvCache *cells = not_null(model, "model")->runner().cells();
        require(cells != nullptr,
                "the KV cache has the BLOCK layout: the caller hands out its slots");
        code = body(*cells);
        if (code != LLAISYS_KV_OK) {
            set_last_error(LLAISYS_ERROR_INVALID, text_of(code));
        }
    });
    return status == LLAISYS_OK ? code : LLAISYS_KV_INTERNAL_ERROR;
}

} // namespace

std::shared_ptr<parallel::ProcessGroup>
LlaisysModel::group_of(const LlaisysModelCreateParams &params) {
    parallel::GroupOptions options;
    options.name = text_or(params.tp_group_name, "TP0");
    options.init_method = text_or(params.init_method, "");
    options.ranks.clear();
    for (int rank = 0; rank < std::max(1, params.tensor_parallel_size); ++rank) {
        options.ranks.push_back(rank);
    }
    options.rank = params.rank;
    options.device = params.device;
    options.device_id = device_of(params);
    if (options.ranks.size() == 1) { // nobody to meet
        return std::make_shared<parallel::ProcessGroupOne>(options);
    }
    const std::string executor = text_or(params.distributed_executor_backend, "uni");
    const char *backend = executor == "uni" ? "threads" : executor == "mp" ? "shm" : "tcp";
    return parallel::ProcessGroupFactory::Instance().GetOrCreate(backend, options);
}

runtime::RunnerOptions LlaisysModel::complete(LlaisysModelCreateParams *params,
                                              const models::Model &model) {
    if (params->kv_cache_block_size == 0) {
        params->kv_cache_block_size = kDefaultBlockSize;
    }
    if (params->max_model_len == 0) {
        params->max_model_len = model.max_positions();
    }
    require(params->max_model_len <= model.max_positions(),
            "params.max_model_len must be at most meta.maxseq, ", model.max_positions(), ", got ",
            params->max_model_len);
    if (params->kv_cache_capacity_tokens == 0) {
        params->kv_cache_capacity_tokens = params->max_model_len;
    }
    const int64_t block = params->kv_cache_block_size;
    require(params->kv_cache_capacity_tokens <= kMaxSlots,
            "params.kv_cache_capacity_tokens must be at most ", kMaxSlots, ", got ",
            params->kv_cache_capacity_tokens);
    if (params->kv_cache_layout == LLAISYS_KV_LAYOUT_BLOCK) {
        params->kv_cache_capacity_tokens =
            (params->kv_cache_capacity_tokens + block - 1) / block * block;
    }
    if (params->max_batch_tokens == 0) {
        params->max_batch_tokens = kDefaultBatchTokens;
    }
    if (params->kv_cache_dtype == LLAISYS_DTYPE_INVALID) {
        params->kv_cache_dtype = model.kv_spec().dtype;
    }
    runtime::RunnerOptions options;
    options.kv_dtype = params->kv_cache_dtype;
    options.layout = LlaisysKvLayout(params->kv_cache_layout);
    options.block_size = params->kv_cache_block_size;
    options.n_slots = params->kv_cache_capacity_tokens;
    options.max_positions = params->max_model_len;
    options.max_ubatch = params->max_batch_tokens;
    return options;
}

LlaisysModel *llaisysModelCreate(const LlaisysModelCreateParams *params) {
    LlaisysModel *model = nullptr;
    guard([&] {
        check_params(*not_null(params, "params"));
        model = new LlaisysModel(*params);
    });
    return model;
}

void llaisysModelDestroy(LlaisysModel *model) { delete model; }

LlaisysModelType llaisysModelType(const LlaisysModel *model) {
    return model != nullptr ? model->model->type() : LLAISYS_MODEL_TYPE_UNKNOWN;
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

// -- Running ---------------------------------------------------------------------------------------

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
        // A batch that can never fit is refused by the runner without a look at its arrays.
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
        const int32_t ranks = not_null(model, "model")->params.get().tensor_parallel_size;
        if (ranks > 1) {
            fail(LLAISYS_ERROR_UNSUPPORTED, "steps of a model of ", ranks,
                 " ranks cannot be launched; use llaisysModelStep");
        }
        *not_null(ticket, "ticket") = model->pipeline.launch(checked(input), checked(sampling));
    });
}

int32_t llaisysModelCollect(LlaisysModel *model, int64_t ticket, int32_t *ids) {
    return guard([&] {
        const int32_t code =
            not_null(model, "model")->pipeline.collect(ticket, not_null(ids, "ids"));
        if (code == LLAISYS_DECODE_NO_KV_SLOT) {
            say_no_slot();
        } else if (code == LLAISYS_DECODE_ABORTED) {
            set_last_error(LLAISYS_ERROR_INTERNAL, "not run: the step launched before it failed");
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
    guard([&] { row = model->runner().host_rows() + i * model->runner().output().row_size(); });
    return row;
}

int32_t llaisysModelKeepHidden(LlaisysModel *model, const int32_t *layers, int32_t n) {
    return guard([&] {
        not_null(model, "model");
        require(n >= 0 && n <= kMaxKept, "n must be in [0, ", kMaxKept, "], got ", n);
        require(n == 0 || layers != nullptr, "layers is NULL");
        model->runner().keep_hidden({layers, layers + n});
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
        not_null(model, "model")->runner().sample(checked(sampling), not_null(ids, "ids"));
    });
}

int32_t llaisysModelLogprobs(LlaisysModel *model, int32_t i, LlaisysLogprobs *logprobs) {
    return guard([&] {
        *not_null(logprobs, "logprobs") = not_null(model, "model")->runner().sampler().logprobs(i);
    });
}

int32_t llaisysModelSamplerReset(LlaisysModel *model, int64_t seq_id, const int64_t *prompt,
                                 int32_t n_prompt) {
    return guard([&] {
        not_null(model, "model");
        require(n_prompt >= 0, "n_prompt must not be negative, got ", n_prompt);
        require(prompt != nullptr || n_prompt == 0, "prompt is NULL");
        model->runner().sampler().reset(seq_id, prompt, n_prompt);
    });
}

int32_t llaisysModelSamplerAccept(LlaisysModel *model, int64_t seq_id, const int64_t *tokens,
                                  int32_t n_tokens) {
    return guard([&] {
        not_null(model, "model");
        require(n_tokens >= 0, "n_tokens must not be negative, got ", n_tokens);
        require(tokens != nullptr || n_tokens == 0, "tokens is NULL");
        model->runner().sampler().accept(seq_id, tokens, n_tokens);
    });
}

int32_t llaisysModelSamplerForget(LlaisysModel *model, int64_t seq_id) {
    return guard([&] { not_null(model, "model")->runner().sampler().forget(seq_id); });
}

int32_t llaisysModelPooled(LlaisysModel *model, int64_t seq_id, float *vector, int64_t n) {
    return guard([&] {
        not_null(model, "model")->runner().pool().read(seq_id, not_null(vector, "vector"), n);
    });
}

int32_t llaisysModelPoolForget(LlaisysModel *model, int64_t seq_id) {
    return guard([&] { not_null(model, "model")->runner().pool().forget(seq_id); });
}

int32_t llaisysModelProfile(LlaisysModel *model, LlaisysProfile *profile, int32_t reset) {
    return guard([&] {
        not_null(profile, "profile");
        require(profile->struct_size == sizeof *profile, "profile.struct_size must be ",
                sizeof *profile, ", got ", profile->struct_size);
        *profile = not_null(model, "model")->runner().profile().times();
        const parallel::GroupTimes &met = model->group->times(); // inside of forward
        profile->collective = {met.seconds, met.count};
        profile->forward.seconds = std::max(0.0, profile->forward.seconds - met.seconds);
        if (reset != 0) {
            model->runner().profile().reset();
            model->group->reset_times();
        }
    });
}

// -- KV cache --------------------------------------------------------------------------------------

int32_t llaisysModelKvSeqCp(LlaisysModel *model, int64_t dst_seq, int64_t src_seq, int64_t p0,
                            int64_t p1) {
    return kv_call(model, [&](auto &cells) { return cells.seq_cp(dst_seq, src_seq, p0, p1); });
}

int32_t llaisysModelKvSeqRm(LlaisysModel *model, int64_t seq_id, int64_t p0, int64_t p1) {
    return kv_call(model, [&](auto &cells) { return cells.seq_rm(seq_id, p0, p1); });
}

int32_t llaisysModelKvSeqAdd(LlaisysModel *model, int64_t seq_id, int64_t p0, int64_t p1,
                             int64_t delta) {
    return kv_call(model, [&](auto &cells) { return cells.seq_add(seq_id, p0, p1, delta); });
}

int32_t llaisysModelKvSeqKeep(LlaisysModel *model, int64_t seq_id) {
    return kv_call(model, [&](auto &cells) { return cells.seq_keep(seq_id); });
}

int64_t llaisysModelKvSeqPosMax(LlaisysModel *model, int64_t seq_id) {
    int64_t position = -1;
    kv_call(model,
            [&](auto &cells) { return position = cells.seq_pos_max(seq_id), LLAISYS_KV_OK; });
    return position;
}

int64_t llaisysModelKvSeqPosMin(LlaisysModel *model, int64_t seq_id) {
    int64_t position = -1;
    kv_call(model,
            [&](auto &cells) { return position = cells.seq_pos_min(seq_id), LLAISYS_KV_OK; });
    return position;
}

int32_t llaisysModelKvStats(LlaisysModel *model, LlaisysKvStats *stats) {
    return guard([&] {
        not_null(stats, "stats");
        require(stats->struct_size == sizeof *stats, "stats.struct_size must be ", sizeof *stats,
                ", got ", stats->struct_size);
        *stats = not_null(model, "model")->runner().kv_stats();
    });
}

int32_t llaisysModelKvDump(LlaisysModel *model, char *text, size_t capacity, size_t *length) {
    return guard([&] {
        require(text != nullptr || capacity == 0, "text is NULL");
        const std::string dump = not_null(model, "model")->runner().kv_dump();
        *not_null(length, "length") = dump.size();
        if (capacity > 0) {
            const size_t n = std::min(capacity - 1, dump.size());
            std::memcpy(text, dump.data(), n);
            text[n] = '\0';
        }
    });
}

int32_t llaisysModelKvCopySlots(LlaisysModel *model, const int32_t *src, const int32_t *dst,
                                int32_t n) {
    return guard([&] {
        not_null(model, "model");
        require(model->runner().cells() == nullptr,
                "the KV cache has the SLOT layout: use KvSeqCp");
        require(n >= 0, "n must not be negative, got ", n);
        require(n == 0 || (src != nullptr && dst != nullptr), "src or dst is NULL");
        model->runner().copy_slots(src, dst, n);
    });
}

int32_t llaisysModelKvShiftSlots(LlaisysModel *model, const int32_t *slots, const int64_t *delta,
                                 int32_t n) {
    return guard([&] {
        not_null(model, "model");
        require(model->runner().cells() == nullptr,
                "the KV cache has the SLOT layout: use KvSeqAdd");
        require(n >= 0, "n must not be negative, got ", n);
        require(n == 0 || (slots != nullptr && delta != nullptr), "slots or delta is NULL");
        model->runner().shift_slots(slots, delta, n);
    });
}
