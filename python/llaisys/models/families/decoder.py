"""`DecoderFamily`: the differences between decoder families as data, and their config parsing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from llaisys.common.errors import ModelLoadError
from llaisys.models.families import decoder_tensors
from llaisys.models.families.decoder_tensors import EMBEDDING, FIRST_PROJECTION, OUTPUT
from llaisys.models.families.model_config import ModelConfig
from llaisys.models.families.rope import parse_rope, rope_from_gguf
from llaisys.models.loading.family import Family, GgufContents
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.gguf_reader import GgufTensor
from llaisys.models.loading.json_config import parse_generation, stored_dtype
from llaisys.models.loading.limits import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
)
from llaisys.models.loading.quantization import parse_quantization

Windows = tuple[int | None, tuple[int, ...]]  # (window in tokens, layers with that window)
_END_KEYS = ("eos", "eot", "eom")  # GGUF metadata: tokens that end a turn


def no_windows(fields: Fields, layers: int) -> Windows:
    """Full attention in every layer, even if the config names a window."""
    return None, ()


@dataclass(frozen=True, slots=True)
class DecoderFamily(Family):
    """A decoder with RMS norm, RoPE, grouped-query attention and SwiGLU."""

    name: str
    attention_bias: bool | None = None  # q, k, v have a bias; None: config's 'attention_bias'
    output_bias: bool = False  # o has a bias if q, k and v have one
    qk_norm: bool = False  # RMS norm per head of q and k before RoPE
    windows: Callable[[Fields, int], Windows] = no_windows  # (config.json, number of layers)
    default_head_dim: int | None = None  # without 'head_dim'; None: hidden / heads
    has_gguf_files: bool = True  # under this architecture name
    is_permuted_in_gguf: bool = False  # rows of q and k are in interleaved RoPE order
    gguf_pre_tokenizer: str = "default"

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
        return decoder_tensors.tensors(config)

    def name_from_gguf(self, name: str) -> str | None:
        return decoder_tensors.name_from_gguf(name, self.qk_norm)

    def permuted_heads(self, name: str, config: ModelConfig) -> int | None:
        if not self.is_permuted_in_gguf:
            return None
        if ".self_attn.q_proj." in name:
            return config.num_heads
        return config.num_kv_heads if ".self_attn.k_proj." in name else None

    def config_from_json(self, fields: Fields, generation: Fields) -> ModelConfig:
        _reject_variants(fields)
        hidden = fields.integer("hidden_size", 1, MAX_HIDDEN)
        layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
        heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
        vocab = fields.integer("vocab_size", 1, MAX_VOCAB)
        default_head_dim = self.default_head_dim
        if default_head_dim is None:
            if not fields.has("head_dim") and hidden % heads:
                raise fields.fail("hidden_size", f"{hidden} is not a multiple of {heads} heads")
            default_head_dim = hidden // heads
        head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, default_head_dim)
        theta, scaling = parse_rope(fields, head_dim)
        length = longest = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
        if scaling is not None:
            length, longest = scaling.contexts(length)
        window, window_layers = self.windows(fields, layers)
        bias = self.attention_bias
        if bias is None:
            bias = fields.boolean("attention_bias", False)
        eos = generation.id_list("eos_token_id", vocab) + fields.id_list("eos_token_id", vocab)
        bos = fields.id_list("bos_token_id", vocab) or generation.id_list("bos_token_id", vocab)
        result = ModelConfig(
            model_type=self.name,
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
            output_bias=bias and self.output_bias,
            qk_norm=self.qk_norm,
            sliding_window=window,
            window_layers=window_layers,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            bos_token_id=bos[0] if bos else None,
            dtype=stored_dtype(fields),
            generation=parse_generation(generation),
            quantization=parse_quantization(fields),
        )
        result.check(fields.where)
        return result

    def config_from_gguf(self, contents: GgufContents) -> ModelConfig:
        if not self.has_gguf_files:
            raise contents.unsupported(self.name)
        fields, tensors = contents.metadata, contents.tensors
        where, arch = fields.where, self.name
        if fields.integer(f"{arch}.expert_count", 0, 1 << 16, 0):
            why = "is not 0; mixtures of experts are not supported"
            raise fields.fail(f"{arch}.expert_count", why)
        hidden = fields.integer(f"{arch}.embedding_length", 1, MAX_HIDDEN)
        heads = fields.integer(f"{arch}.attention.head_count", 1, MAX_HEADS)
        if EMBEDDING not in tensors:
            raise ModelLoadError(f"{where}: tensor 'token_embd.weight' is missing")
        # The embedding determines the vocabulary size: files may pad it.
        vocab = tensors[EMBEDDING].shape[0]
        if vocab > MAX_VOCAB:
            raise ModelLoadError(f"{where}: 'token_embd.weight' has {vocab} rows")
        head_dim = _head_dim(fields, arch, hidden, heads)
        theta = fields.number(f"{arch}.rope.freq_base", 1e-3, 1e12, 10000.0)
        read = contents.read_rope_factors
        factors = None if read is None else read((head_dim // 2,))
        scaling = rope_from_gguf(fields, arch, theta, factors)
        length = longest = fields.integer(f"{arch}.context_length", 1, MAX_POSITIONS)
        if scaling is not None:
            length, longest = scaling.contexts(length)
        first = "model.layers.0.self_attn"
        ends = (f"tokenizer.ggml.{key}_token_id" for key in _END_KEYS)
        eos = [fields.integer(key, 0, vocab - 1, None) for key in ends]
        result = ModelConfig(
            model_type=arch,
            hidden_size=hidden,
            num_layers=fields.integer(f"{arch}.block_count", 1, MAX_LAYERS),
            num_heads=heads,
            num_kv_heads=fields.integer(f"{arch}.attention.head_count_kv", 1, MAX_HEADS, heads),
            head_dim=head_dim,
            intermediate_size=fields.integer(f"{arch}.feed_forward_length", 1, MAX_INTERMEDIATE),
            vocab_size=vocab,
            rms_norm_eps=fields.number(f"{arch}.attention.layer_norm_rms_epsilon", 0.0, 1.0),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=length,
            longest_context=longest,
            tie_word_embeddings=OUTPUT not in tensors,
            attention_bias=f"{first}.q_proj.bias" in tensors,
            output_bias=f"{first}.o_proj.bias" in tensors,
            qk_norm=self.qk_norm,
            sliding_window=None,
            window_layers=(),
            eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
            bos_token_id=fields.integer("tokenizer.ggml.bos_token_id", 0, vocab - 1, None),
            dtype=_compute_dtype(tensors),
            generation={},
        )
        if fields.has(f"{arch}.attention.sliding_window"):
            raise fields.fail(f"{arch}.attention.sliding_window", "is not supported in GGUF files")
        result.check(where)
        return result


def _reject_variants(fields: Fields) -> None:
    """Reject settings that change the forward pass under the same model_type."""
    act = fields.string("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise fields.fail("hidden_act", f"is {act!r}; only 'silu' is supported")
    if fields.boolean("mlp_bias", False):
        raise fields.fail("mlp_bias", "is true; a bias in the MLP is not supported")


def _head_dim(fields: Fields, arch: str, hidden: int, heads: int) -> int:
    key_length = f"{arch}.attention.key_length"
    if not fields.has(key_length) and hidden % heads:
        raise fields.fail(f"{arch}.embedding_length", f"{hidden} is not a multiple of {heads}")
    head_dim = fields.integer(key_length, 2, MAX_HEAD_DIM, hidden // heads)
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        found = fields.integer(key, 1, MAX_HEAD_DIM, head_dim)
        if found != head_dim:
            raise fields.fail(key, f"is {found}; only the head size {head_dim} is supported")
    return int(head_dim)


def _compute_dtype(tensors: Mapping[str, GgufTensor]) -> str:
    """The dtype of the first projection; bf16 for quantised weights."""
    tensor = tensors.get(FIRST_PROJECTION)
    name = "" if tensor is None else tensor.type_name
    return {"F32": "f32", "F16": "f16"}.get(name, "bf16")
