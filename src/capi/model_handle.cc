#include "capi/model_handle.hpp"

#include <algorithm>
#include <numeric>
#include <set>

using namespace llaisys;

namespace llaisys::capi {

namespace {

constexpr int32_t kDefaultBlockSize = 16;
constexpr int32_t kDefaultBatchTokens = 512;
constexpr int32_t kMaxRanks = 64;
constexpr int64_t kMaxSlots = int64_t(1) << 25; // metadata is allocated for every slot

std::string text_or(const char *text, const char *fallback) {
    return text != nullptr && *text != '\0' ? text : fallback;
}

int32_t device_of(const LlaisysModelCreateParams &params) {
    return params.device_ids[params.local_rank];
}

// Whether two ranks use the same device, which NCCL does not support.
bool has_shared_devices(const LlaisysModelCreateParams &params) {
    const std::set<int32_t> distinct(params.device_ids, params.device_ids + params.ndevice);
    return int32_t(distinct.size()) < params.ndevice;
}

// The group of the ranks [first, first + size). stream null: a described one.
std::shared_ptr<parallel::ProcessGroup>
make_group(const LlaisysModelCreateParams &params, const device::Stream *stream,
           const std::string &name, const std::string &init_method, int first, int size) {
    parallel::GroupOptions options;
    options.name = name;
    options.init_method = init_method;
    options.ranks.resize(size_t(size));
    std::iota(options.ranks.begin(), options.ranks.end(), first);
    options.rank = params.rank;
    options.device = params.device;
    options.device_id = device_of(params);
    if (stream == nullptr) {
        return std::make_shared<parallel::DescribedGroup>(options);
    }
    if (options.ranks.size() == 1) {
        return std::make_shared<parallel::ProcessGroupOne>(options);
    }
    const std::string executor = text_or(params.distributed_executor_backend, "uni");
    const char *backend = executor == "uni" ? "threads" : executor == "mp" ? "shm" : "tcp";
    if (params.device == LLAISYS_DEVICE_NVIDIA) {
        options.host_backend = backend;
        options.stream = stream;
        backend = has_shared_devices(params) ? "peer" : "nccl";
    }
    return parallel::ProcessGroupFactory::Instance().GetOrCreate(backend, options);
}

// The tensor-parallel group of a model: the ranks of its stage.
std::shared_ptr<parallel::ProcessGroup> group_of(const LlaisysModelCreateParams &params,
                                                 const device::Stream *stream) {
    const int size = std::max(1, params.tensor_parallel_size);
    const std::string init_method = text_or(params.init_method, "");
    return make_group(params, stream, text_or(params.tp_group_name, "TP0"),
                      init_method.substr(0, init_method.find(' ')), params.rank / size * size,
                      size);
}

// The group of all ranks of a pipeline; null: one stage.
std::shared_ptr<parallel::ProcessGroup> stages_of(const LlaisysModelCreateParams &params,
                                                  const device::Stream *stream) {
    if (params.pipeline_parallel_size <= 1) {
        return nullptr;
    }
    const std::string init_method = text_or(params.init_method, "");
    return make_group(params, stream, text_or(params.tp_group_name, "TP0") + " stages",
                      init_method.substr(init_method.find(' ') + 1), 0, params.world_size);
}

std::unique_ptr<models::Model> make_model(const LlaisysModelCreateParams &given,
                                          std::shared_ptr<parallel::ProcessGroup> group,
                                          std::shared_ptr<parallel::ProcessGroup> stages,
                                          bool is_described) {
    const int device_id = given.ndevice > 0 ? device_of(given) : 0;
    return models::create_model(given.model_type, given.meta,
                                {given.device, device_id, std::move(group),
                                 given.vocab_parallel_head != 0, given.replicate_kv_heads != 0,
                                 std::move(stages), is_described});
}

// Fills in defaults and returns the runner's options.
runtime::RunnerOptions resolve_params(LlaisysModelCreateParams *params,
                                      const models::Model &model) {
    if (params->kv_cache_block_size == 0) {
        params->kv_cache_block_size = kDefaultBlockSize;
    }
    if (params->max_model_len == 0) {
        params->max_model_len = model.spec().max_positions;
    }
    require(params->max_model_len <= model.spec().max_positions,
            "params.max_model_len must be at most meta.maxseq, ", model.spec().max_positions,
            ", got ", params->max_model_len);
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
        params->kv_cache_dtype = model.spec().kv.dtype;
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

} // namespace

void check_create_params(const LlaisysModelCreateParams &params) {
    sized(&params, "params");
    const auto check_range = [](const char *name, int64_t value, int64_t most) {
        require(value >= 0 && value <= most, "params.", name, " must be in [0, ", most, "], got ",
                value);
    };
    const auto check_index = [](const char *name, int32_t value, int32_t count) {
        require(value >= 0 && value < count, "params.", name, " must be in [0, ", count, "), got ",
                value);
    };
    const auto check_natural = [](const char *name, int64_t value) {
        require(value >= 0, "params.", name, " must not be negative, got ", value);
    };
    check_range("ndevice", params.ndevice, 1024);
    require(params.ndevice == 0 || params.device_ids != nullptr, "params.device_ids is NULL");
    require(params.kv_cache_layout == LLAISYS_KV_LAYOUT_SLOT ||
                params.kv_cache_layout == LLAISYS_KV_LAYOUT_BLOCK,
            "params.kv_cache_layout must be slot (0) or block (1), got ", params.kv_cache_layout);
    check_range("kv_cache_block_size", params.kv_cache_block_size, 4096);
    check_natural("max_model_len", params.max_model_len);
    check_natural("kv_cache_capacity_tokens", params.kv_cache_capacity_tokens);
    check_natural("max_batch_tokens", params.max_batch_tokens);
    check_natural("n_threads", params.n_threads);
    check_range("pipeline_parallel_size", params.pipeline_parallel_size, kMaxRanks);
    check_index("local_rank", params.local_rank, std::max(1, params.ndevice));
    check_range("world_size", params.world_size, 1024);
    check_index("rank", params.rank, std::max(1, params.world_size));
    require(params.kv_cache_dtype == LLAISYS_DTYPE_INVALID ||
                ops::is_kv_dtype(params.kv_cache_dtype),
            "params.kv_cache_dtype must be 0, f32, f16, bf16, i8 or f8_e4m3, got ",
            int(params.kv_cache_dtype));
    if (params.kv_cache_dtype == LLAISYS_DTYPE_F8_E4M3 && params.device == LLAISYS_DEVICE_CPU) {
        fail(LLAISYS_ERROR_UNSUPPORTED,
             "params.kv_cache_dtype must be 0, f32, f16, bf16 or i8 on the CPU, got f8_e4m3");
    }
    check_range("tensor_parallel_size", params.tensor_parallel_size, kMaxRanks);
    const int32_t ranks =
        std::max(1, params.tensor_parallel_size) * std::max(1, params.pipeline_parallel_size);
    require(ranks <= 1 || params.world_size == ranks, "params.world_size must be ", ranks,
            ", tensor_parallel_size * pipeline_parallel_size, got ", params.world_size);
    require(ranks <= kMaxRanks, "params.world_size must be at most ", kMaxRanks, ", got ", ranks);
    const std::string backend = text_or(params.distributed_executor_backend, "uni");
    if (backend != "uni" && backend != "mp" && backend != "ray") {
        fail(LLAISYS_ERROR_UNSUPPORTED,
             "params.distributed_executor_backend must be 'uni', 'mp' or 'ray', got '", backend,
             "'");
    }
}

OwnedParams::OwnedParams(const LlaisysModelCreateParams &params) : params_(params) {
    device_ids_.assign(1, 0);
    if (params.ndevice > 0) {
        device_ids_.assign(params.device_ids, params.device_ids + params.ndevice);
    }
    params_.meta = nullptr;
    params_.device_ids = device_ids_.data();
    params_.ndevice = int32_t(device_ids_.size());
    strings_.reserve(5); // pointers to its strings must stay valid
    params_.distributed_executor_backend = copy(params.distributed_executor_backend, "uni");
    params_.distributed_backend = copy(params.distributed_backend, "");
    params_.master_addr = copy(params.master_addr, "");
    params_.init_method = copy(params.init_method, "");
    params_.tp_group_name = copy(params.tp_group_name, "");
}

const char *OwnedParams::copy(const char *text, const char *fallback) {
    strings_.emplace_back(text != nullptr ? text : fallback);
    return strings_.back().c_str();
}

int64_t scratch_bytes(const LlaisysModelCreateParams &given, int32_t n_outputs, int32_t max_loras,
                      int32_t max_rank) {
    OwnedParams params(given);
    const auto model =
        make_model(given, group_of(params.get(), nullptr), stages_of(params.get(), nullptr), true);
    const runtime::RunnerOptions options = resolve_params(&params.get(), *model);
    if (max_loras > 0) {
        model->reserve_lora(nullptr, max_loras, max_rank);
    }
    const int64_t n = std::min<int64_t>(options.max_ubatch, options.n_slots);
    const int64_t rows = std::max<int64_t>(n_outputs, std::min(n, options.reserved_outputs));
    return model->workspace_bytes(n, n) + rows * model->spec().vocabulary * int64_t(sizeof(float));
}

int64_t lora_bytes(const LlaisysModelCreateParams &given, int32_t max_loras, int32_t max_rank) {
    const OwnedParams params(given);
    return make_model(given, group_of(params.get(), nullptr), stages_of(params.get(), nullptr),
                      true)
        ->lora_bytes(max_loras, max_rank);
}

} // namespace llaisys::capi

LlaisysModel::LlaisysModel(const LlaisysModelCreateParams &given)
    : params(given), stream(given.device, capi::device_of(params.get()), given.n_threads),
      group(capi::group_of(params.get(), &stream)), stages(capi::stages_of(params.get(), &stream)),
      model(capi::make_model(given, group, stages, false)),
      runner_(stream, *model, capi::resolve_params(&params.get(), *model)),
      pipeline(stream, runner_, group->size() == 1 && !stages) {
    if (given.exact != 0) {
        stream.make_exact();
    }
}

void LlaisysModel::abort_groups(const std::string &reason) const {
    group->Abort(reason);
    if (stages) {
        stages->Abort(reason);
    }
}

void LlaisysModel::check_groups() const {
    group->CheckResults();
    if (stages) {
        stages->CheckResults();
    }
}

void LlaisysModel::require_last_stage() const {
    require(!stages || stages->rank() < group->size(),
            "only the last pipeline stage has logits, this is rank ", params.get().rank);
}
