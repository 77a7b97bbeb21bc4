"""include/llaisys/runtime/infer_types.h

Array fields are `c_void_p`, so that numpy addresses can be assigned without a cast.
"""

from __future__ import annotations

from ctypes import Structure, c_char_p, c_int32, c_uint32, c_void_p, sizeof


class LlaisysBatch(Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    )


class LlaisysStepInput(Structure):
    _fields_ = (
        ("struct_size", c_uint32),
        ("n_tokens", c_int32),
        ("token_ids", c_void_p),
        ("embd", c_void_p),
        ("positions", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_ids", c_void_p),
        ("n_seq_ids", c_int32),
        ("n_seq", c_int32),
        ("logits", c_void_p),
        ("slot_mapping", c_void_p),
        ("context_lens", c_void_p),
        ("batch_seq_ids", c_void_p),
        ("block_tables", c_void_p),
        ("block_table_width", c_int32),
        ("embd_size", c_int32),
        ("pooling", c_void_p),
        ("lora_slots", c_void_p),
        ("token_types", c_void_p),
    )


class LlaisysStepBuffers(Structure):
    _fields_ = (
        ("struct_size", c_uint32),
        ("n_rows", c_int32),
        ("max_tokens", c_int32),
        ("max_blocks", c_int32),
        ("block_size", c_int32),
        ("max_step_tokens", c_int32),
        ("row_tokens", c_void_p),
        ("row_blocks", c_void_p),
        ("row_seq_ids", c_void_p),
        ("row_lora_slots", c_void_p),
        ("rows", c_void_p),
        ("starts", c_void_p),
        ("n_tokens", c_void_p),
        ("n_logits", c_void_p),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("seq_ids", c_void_p),
        ("logits", c_void_p),
        ("lora_slots", c_void_p),
        ("slot_mapping", c_void_p),
    )

    def __init__(self) -> None:
        super().__init__(sizeof(self))


class LlaisysSamplingNumber(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("values", c_void_p),
    )


class LlaisysSamplingMetadata(Structure):
    _fields_ = (
        ("struct_size", c_uint32),
        ("n_rows", c_int32),
        ("rows", c_void_p),
        ("seq_ids", c_void_p),
        ("numbers", c_void_p),
        ("seeds", c_void_p),
        ("positions", c_void_p),
        ("choices", c_void_p),
        ("chain_offsets", c_void_p),
        ("chain", c_void_p),
        ("bias_offsets", c_void_p),
        ("bias_ids", c_void_p),
        ("bias_values", c_void_p),
        ("mask_rows", c_void_p),
        ("masks", c_void_p),
        ("n_masks", c_int32),
        ("n_numbers", c_int32),
    )


class LlaisysLogprobs(Structure):
    _fields_ = (
        ("n", c_int32),
        ("sampled_rank", c_int32),
        ("ids", c_void_p),
        ("logprobs", c_void_p),
    )
