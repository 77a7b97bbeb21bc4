"""Which weights `--quantization` makes smaller at load, and into what."""

from __future__ import annotations

from llaisys.libllaisys.handles import Stream, Tensor
from llaisys.libllaisys.library import check, lib

CHOICES = ("int8", "int4")  # EngineConfig.quantization
BLOCK = 32  # columns that share a scale
# What int4 keeps in 8 bits: what llama.cpp's mixed files keep in more bits than the rest.
_WIDER = ("model.embed_tokens.weight", "lm_head.weight", ".down_proj.weight")


def quantised_dtype(quantization: str | None, name: str, shape: tuple[int, ...]) -> str | None:
    """The dtype that a tensor gets; None: it stays as it is. `shape`: of what this rank holds."""
    if quantization is None or len(shape) != 2 or shape[1] % BLOCK:
        return None
    if quantization == "int8" or name.endswith(_WIDER):
        return "q8_0"
    return "q4_1"


def quantise(tensor: Tensor, dtype: str, stream: Stream) -> Tensor:
    """A new tensor of blocks; the old one is closed."""
    with tensor:
        result = Tensor.create(tensor.shape, dtype)
        try:
            check(lib().llaisysQuantise(stream.handle, result.handle, tensor.handle))
        except BaseException:
            result.close()
            raise
    return result
