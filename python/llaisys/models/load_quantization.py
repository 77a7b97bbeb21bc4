"""`--quantization`: dtypes of weights that are quantized at load."""

from __future__ import annotations

from llaisys.libllaisys.handles import Stream, Tensor
from llaisys.libllaisys.library import check, lib

CHOICES = ("int8", "int4")  # EngineConfig.quantization
BLOCK = 32  # columns that share a scale
# 8 bits even with int4, as in llama.cpp's mixed quantizations.
_WIDER = ("model.embed_tokens.weight", "lm_head.weight", ".down_proj.weight")

# Routers and gates of shared experts: small, and a rounded score selects another expert.
_PLAIN = (".mlp.gate.weight", ".shared_expert_gate.weight")


def quantised_dtype(quantization: str | None, name: str, shape: tuple[int, ...]) -> str | None:
    """Quantised dtype of a tensor; None: unchanged. `shape`: of this rank's shard."""
    if quantization is None or len(shape) != 2 or shape[1] % BLOCK or name.endswith(_PLAIN):
        return None
    if quantization == "int8" or name.endswith(_WIDER):
        return "q8_0"
    return "q4_1"


def quantise(tensor: Tensor, dtype: str, stream: Stream) -> Tensor:
    """Return a quantised copy and close `tensor`."""
    with tensor:
        result = Tensor.create(tensor.shape, dtype)
        try:
            check(lib().llaisysQuantise(stream.handle, result.handle, tensor.handle))
        except BaseException:
            result.close()
            raise
    return result
