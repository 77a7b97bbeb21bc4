"""Phi-3 and Phi-4: fused q/k/v and gate/up tensors, LongRoPE, RoPE of part of a head."""

from __future__ import annotations

from llaisys.models.families.decoder import DecoderFamily
from llaisys.models.families.decoder_tensors import TensorNames
from llaisys.models.families.partial_rotary import partial_layout
from llaisys.models.families.windows import every_layer, gguf_every_layer

PHI3 = DecoderFamily(
    name="phi3",
    attention_bias=False,
    windows=every_layer,
    gguf_windows=gguf_every_layer,
    rope_layout=partial_layout,
    has_partial_rotary=True,
    names=TensorNames(has_fused_qkv=True, has_fused_gate_up=True),
    defaults={"rms_norm_eps": 1e-5},
    gguf_pre_tokenizer="default",
)
