"""`ModelConfig`: the hyper-parameters of a checkpoint, whatever file format they came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llaisys.common.errors import ModelLoadError
from llaisys.common.options import Integer, Number
from llaisys.common.sampling import FIELDS
from llaisys.models.families import CheckpointConfig, DecoderFamily, family_of
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.rope import MAX_POSITIONS, RopeScaling, parse_rope
from llaisys.tokenization.json_file import read_json_object, read_optional_json_object

DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}

# Caps that no real model comes near; they keep a damaged file from asking for absurd memory.
MAX_LAYERS = 1024
MAX_HIDDEN = 1 << 17
MAX_INTERMEDIATE = 1 << 20
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_VOCAB = 1 << 22
MAX_PARAMETERS = 1 << 42


@dataclass(frozen=True, slots=True)
class ModelConfig(CheckpointConfig):
    """Of a decoder; every size is positive and the heads divide."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # divides num_heads
    head_dim: int  # even
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    longest_context: int  # that may be asked for; max_position_embeddings is what is taken unasked
    tie_word_embeddings: bool
    attention_bias: bool  # q, k, v have a bias
    output_bias: bool  # o_proj has one too
    qk_norm: bool  # each head of q and k is normed before it is rotated
    # The window of the layers listed in window_layers (all of them or a part); None: no layer.
    sliding_window: int | None
    window_layers: tuple[int, ...]
    bos_token_id: int | None

    def layer_window(self, layer: int) -> int | None:
        """The attention window of one layer in tokens; None: full attention."""
        return self.sliding_window if layer in self.window_layers else None

    def check(self, where: str) -> None:
        """Raise unless the sizes fit together; `where` names the file."""
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{where}: {self.num_heads} attention heads are not a multiple of "
                f"{self.num_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"{where}: head_dim {self.head_dim} is odd; RoPE needs even")
        per_layer = self.hidden_size * (
            2 * self.head_dim * (self.num_heads + self.num_kv_heads) + 3 * self.intermediate_size
        )
        total = self.num_layers * per_layer + 2 * self.vocab_size * self.hidden_size
        if total > MAX_PARAMETERS:
            raise ModelLoadError(
                f"{where}: the sizes ask for {total} parameters, more than {MAX_PARAMETERS}"
            )


def load_config(directory: Path) -> Any:
    """Read config.json (and generation_config.json where present) of a model directory."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"{directory}: config.json is missing")
    generation = read_optional_json_object(directory / "generation_config.json")
    return parse_config(read_json_object(path), generation, where=str(path))


def parse_config(
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    where: str = "config.json",
) -> Any:
    """What the family makes of the dictionaries of a Hugging Face model directory: a
    CheckpointConfig, for decoders a `ModelConfig`."""
    fields = Fields(config, where)
    extra = Fields(generation or {}, "generation_config.json")
    return family_of(fields.string("model_type"), where).config_from_json(fields, extra)


def decoder_config(family: DecoderFamily, fields: Fields, extra: Fields) -> ModelConfig:
    """`extra`: of generation_config.json."""
    _refuse_variants(fields)
    hidden = fields.integer("hidden_size", 1, MAX_HIDDEN)
    layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    vocab = fields.integer("vocab_size", 1, MAX_VOCAB)
    default_head_dim = family.default_head_dim
    if default_head_dim is None:
        if not fields.has("head_dim") and hidden % heads:
            raise fields.fail("hidden_size", f"{hidden} is not a multiple of {heads} heads")
        default_head_dim = hidden // heads
    head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, default_head_dim)
    theta, scaling = parse_rope(fields, head_dim)
    length = longest = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
    if scaling is not None:
        length, longest = scaling.contexts(length)
    window, window_layers = _sliding_window(fields, layers) if family.has_windows else (None, ())
    bias = family.attention_bias
    if bias is None:
        bias = fields.boolean("attention_bias", False)
    eos = extra.id_list("eos_token_id", vocab) + fields.id_list("eos_token_id", vocab)
    bos = fields.id_list("bos_token_id", vocab) or extra.id_list("bos_token_id", vocab)
    result = ModelConfig(
        model_type=family.name,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", 1, MAX_HEADS, heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_INTERMEDIATE),
        vocab_size=vocab,
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=length,
        longest_context=longest,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=bias,
        output_bias=bias and family.output_bias,
        qk_norm=family.qk_norm,
        sliding_window=window,
        window_layers=window_layers,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos[0] if bos else None,
        dtype=_dtype(fields),
        generation=parse_generation(extra),
    )
    result.check(fields.where)
    return result


def _refuse_variants(fields: Fields) -> None:
    """Settings under the same model_type that would silently give a different model."""
    act = fields.string("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise fields.fail("hidden_act", f"is {act!r}; only 'silu' is supported")
    if fields.boolean("mlp_bias", False):
        raise fields.fail("mlp_bias", "is true; a bias in the MLP is not supported")
    if fields.has("quantization_config"):
        method = fields.section("quantization_config").values.get("quant_method")
        raise fields.fail("quantization_config", f"(quant_method {method!r}) is not supported")


def _sliding_window(fields: Fields, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """(window, layers that use it): those from max_window_layers on, when switched on."""
    if not fields.boolean("use_sliding_window", False):
        return None, ()
    window = fields.integer("sliding_window", 1, MAX_POSITIONS, None)
    if window is None:
        return None, ()
    types = fields.values.get("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", 0, MAX_POSITIONS, 28)
        chosen = tuple(range(min(first, layers), layers))
    else:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != layers:
            raise fields.fail("layer_types", f"must be a list of {layers} names")
        for item in types:
            if item not in known:
                raise fields.fail("layer_types", f"holds {item!r}; known: {', '.join(known)}")
        chosen = tuple(i for i, item in enumerate(types) if item == "sliding_attention")
    return (window, chosen) if chosen else (None, ())


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    if not fields.has(key):
        return "auto"
    name = fields.string(key).removeprefix("torch.")
    if name not in DTYPES:
        raise fields.fail(key, f"is {name!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def parse_generation(fields: Fields) -> dict[str, float | int]:
    """Sampling defaults of generation_config.json: the fields of SamplingParams that a model may
    set. `do_sample: false` means temperature 0; a top_p of 0, as some files have it, is none."""
    found: dict[str, float | int] = {}
    for name, about in FIELDS.items():
        kind = about.kind
        if not about.from_model or not isinstance(kind, (Integer, Number)):
            continue
        if isinstance(kind, Integer):
            value = fields.integer(name, kind.low, kind.high, None)
        else:
            value = fields.number(name, kind.low, kind.high, None)
        if value is not None and not (isinstance(kind, Number) and kind.above_low and value == 0):
            found[name] = value
    if not fields.boolean("do_sample", True):
        found["temperature"] = 0.0
    return found
