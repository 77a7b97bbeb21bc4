"""include/llaisys/models/model.h"""

from __future__ import annotations

from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_void_p,
)
from typing import Any

from llaisys.libllaisys.infer_types import (
    LlaisysBatch,
    LlaisysLogprobs,
    LlaisysSamplingMetadata,
    LlaisysStepBuffers,
    LlaisysStepInput,
)
from llaisys.libllaisys.kv_cache import LlaisysKvStats

MODEL_TYPES = {
    **{"unknown": 0, "qwen2": 1, "mock": 2, "llama": 3, "qwen3": 4, "decoder": 5},
    "draft_head": 6,
}


class LlaisysModelCreateParams(Structure):
    _fields_ = (
        ("model_type", c_int),
        ("meta", c_void_p),
        ("device", c_int),
        ("device_ids", c_void_p),
        ("ndevice", c_int32),
        ("kv_cache_layout", c_int32),
        ("kv_cache_block_size", c_int32),
        ("max_model_len", c_int64),
        ("kv_cache_capacity_tokens", c_int64),
        ("tensor_parallel_size", c_int32),
        ("pipeline_parallel_size", c_int32),
        ("world_size", c_int32),
        ("rank", c_int32),
        ("local_rank", c_int32),
        ("distributed_executor_backend", c_char_p),
        ("distributed_backend", c_char_p),
        ("master_addr", c_char_p),
        ("master_port", c_int32),
        ("node_rank", c_int32),
        ("nnodes", c_int32),
        ("init_method", c_char_p),
        ("tp_group_name", c_char_p),
        ("use_single_process_tp", c_int32),
        ("struct_size", c_uint32),
        ("n_threads", c_int32),
        ("max_batch_tokens", c_int32),
        ("kv_cache_dtype", c_int),
        ("vocab_parallel_head", c_int32),
        ("replicate_kv_heads", c_int32),
        ("exact", c_int32),
    )


class LlaisysStageProfile(Structure):
    _fields_ = (("seconds", c_double), ("count", c_int64))


class LlaisysProfile(Structure):
    _fields_ = (
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("prepare", LlaisysStageProfile),
        ("attn_meta", LlaisysStageProfile),
        ("forward", LlaisysStageProfile),
        ("sample", LlaisysStageProfile),
        ("memcpy", LlaisysStageProfile),
        ("collective", LlaisysStageProfile),
    )


STAGES = tuple(name for name, kind in LlaisysProfile._fields_ if kind is LlaisysStageProfile)


FUNCTIONS: list[tuple[str, Any, list[Any]]] = [
    ("llaisysModelCreate", c_void_p, [POINTER(LlaisysModelCreateParams)]),
    (
        "llaisysModelScratchBytes",
        c_int32,
        [POINTER(LlaisysModelCreateParams), c_int32, c_int32, c_int32, POINTER(c_int64)],
    ),
    (
        "llaisysModelLoraBytes",
        c_int32,
        [POINTER(LlaisysModelCreateParams), c_int32, c_int32, POINTER(c_int64)],
    ),
    ("llaisysModelDestroy", None, [c_void_p]),
    ("llaisysModelType", c_int, [c_void_p]),
    ("llaisysModelParams", c_int32, [c_void_p, POINTER(LlaisysModelCreateParams)]),
    ("llaisysModelWeights", c_void_p, [c_void_p]),
    ("llaisysModelReplaceWeight", c_int32, [c_void_p, c_char_p, c_int32, c_void_p]),
    ("llaisysModelReserveLora", c_int32, [c_void_p, c_int32, c_int32]),
    (
        "llaisysModelSetLora",
        c_int32,
        [c_void_p, c_int32, c_char_p, c_int32, c_void_p, c_void_p, c_float],
    ),
    ("llaisysModelClearLora", c_int32, [c_void_p, c_int32]),
    ("llaisysModelStep", c_int32, [c_void_p, POINTER(LlaisysStepInput)]),
    ("llaisysModelDecode", c_int32, [c_void_p, LlaisysBatch]),
    (
        "llaisysModelLaunch",
        c_int32,
        [c_void_p, POINTER(LlaisysStepInput), POINTER(LlaisysSamplingMetadata), POINTER(c_int64)],
    ),
    ("llaisysModelCollect", c_int32, [c_void_p, c_int64, c_void_p]),
    ("llaisysModelCollectedLogprobs", c_int32, [c_void_p, c_int32, POINTER(LlaisysLogprobs)]),
    ("llaisysGraphRows", c_int32, [c_int32, c_int32]),
    ("llaisysModelNOutputs", c_int32, [c_void_p]),
    ("llaisysModelOutputIds", c_void_p, [c_void_p]),
    ("llaisysModelGetLogits", c_void_p, [c_void_p]),
    ("llaisysModelGetLogitsIth", c_void_p, [c_void_p, c_int32]),
    ("llaisysModelSample", c_int32, [c_void_p, POINTER(LlaisysSamplingMetadata), c_void_p]),
    ("llaisysModelLogprobs", c_int32, [c_void_p, c_int32, POINTER(LlaisysLogprobs)]),
    ("llaisysModelSampleCounts", c_int32, [c_void_p, POINTER(c_int64), POINTER(c_int64)]),
    ("llaisysModelSamplerReset", c_int32, [c_void_p, c_int64, c_void_p, c_int32]),
    ("llaisysModelSamplerAccept", c_int32, [c_void_p, c_int64, c_void_p, c_int32]),
    ("llaisysModelSamplerForget", c_int32, [c_void_p, c_int64]),
    ("llaisysModelKeepHidden", c_int32, [c_void_p, c_void_p, c_int32]),
    ("llaisysModelGetHidden", c_void_p, [c_void_p]),
    ("llaisysModelPooled", c_int32, [c_void_p, c_int64, c_void_p, c_int64]),
    ("llaisysModelPoolForget", c_int32, [c_void_p, c_int64]),
    ("llaisysModelProfile", c_int32, [c_void_p, POINTER(LlaisysProfile), c_int32]),
    ("llaisysModelKvSeqCp", c_int32, [c_void_p, c_int64, c_int64, c_int64, c_int64]),
    ("llaisysModelKvSeqRm", c_int32, [c_void_p, c_int64, c_int64, c_int64]),
    ("llaisysModelKvSeqAdd", c_int32, [c_void_p, c_int64, c_int64, c_int64, c_int64]),
    ("llaisysModelKvSeqKeep", c_int32, [c_void_p, c_int64]),
    ("llaisysModelKvSeqPosMax", c_int64, [c_void_p, c_int64]),
    ("llaisysModelKvSeqPosMin", c_int64, [c_void_p, c_int64]),
    ("llaisysModelKvStats", c_int32, [c_void_p, POINTER(LlaisysKvStats)]),
    ("llaisysModelKvDump", c_int32, [c_void_p, c_char_p, c_size_t, POINTER(c_size_t)]),
    ("llaisysModelKvCopySlots", c_int32, [c_void_p, c_void_p, c_void_p, c_int32]),
    ("llaisysModelKvShiftSlots", c_int32, [c_void_p, c_void_p, c_void_p, c_int32]),
    ("llaisysModelKvReserveHost", c_int32, [c_void_p, c_int32, c_int32]),
    ("llaisysModelKvToHost", c_int32, [c_void_p, c_void_p, c_void_p, c_int32]),
    ("llaisysModelKvFromHost", c_int32, [c_void_p, c_void_p, c_void_p, c_int32]),
    ("llaisysBatchInit", LlaisysBatch, [c_int32, c_int32, c_int32]),
    ("llaisysBatchGetOne", LlaisysBatch, [c_void_p, c_int32]),
    ("llaisysBatchFree", None, [LlaisysBatch]),
    ("llaisysFillStepTokens", c_int32, [POINTER(LlaisysStepBuffers), c_int32]),
    ("llaisysFillStepSlots", c_int32, [POINTER(LlaisysStepBuffers), c_int32]),
]
