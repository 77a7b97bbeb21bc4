"""`--quantization`: dtypes of weights that are quantized at load."""

from llaisys.common.closing import closed_on_error
from llaisys.libllaisys.handles import Stream, Tensor
from llaisys.libllaisys.library import check, lib

CHOICES = ("int8", "int4", "fp8")  # EngineConfig.quantization
ON_CPU = ("int8", "int4")
BLOCK = 32  # columns that share a scale
F8_BLOCK = 128  # columns of a block of f8_g128
# int8 in every choice.
_TABLES = ("model.embed_tokens.weight", "lm_head.weight", "in_embed", "out_embed")
# int8 with int4 on the CPU, as in llama.cpp's mixed quantizations.
_WIDER = (".down_proj.weight",)

# Routers and gates of shared experts: small, and a rounded score selects another expert. The
# up-projections of latent attention: small, one product per head.
_PLAIN = (
    *(".mlp.gate.weight", ".shared_expert_gate.weight"),
    *(".self_attn.k_b_proj.weight", ".self_attn.v_b_proj.weight"),
)


def quantised_dtype(
    quantization: str | None, name: str, shape: tuple[int, ...], device: str = "cpu"
) -> str | None:
    """Quantised dtype of a tensor; None: unchanged. `shape`: of this rank's shard."""
    if quantization is None or len(shape) != 2 or shape[1] % BLOCK or name.endswith(_PLAIN):
        return None
    if quantization == "int8" or name.endswith(_TABLES):
        return "q8_0"
    if quantization == "fp8":
        return "f8_g128" if shape[1] % F8_BLOCK == 0 else "q8_0"
    return "q8_0" if device == "cpu" and name.endswith(_WIDER) else "q4_1"


def quantise(tensor: Tensor, dtype: str, stream: Stream) -> Tensor:
    """Return a quantised copy and close `tensor`."""
    with tensor:
        result = Tensor.create(tensor.shape, dtype)
        with closed_on_error(result):
            check(lib().llaisysQuantise(stream.handle, result.handle, tensor.handle))
    return result
