"""`DecoderFamily`: the differences between decoder families as data, and their config parsing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llaisys.common.errors import ModelLoadError
from llaisys.models.families import decoder_tensors
from llaisys.models.families.decoder_tensors import (
    EMBEDDING,
    OUTPUT,
    TensorNames,
    source_of,
)
from llaisys.models.families.experts import (
    ExpertNames,
    Experts,
    ReadExperts,
    expert_source,
    no_experts,
)
from llaisys.models.families.latent import ReadLatent, no_latent
from llaisys.models.families.model_config import ModelConfig
from llaisys.models.families.rope import (
    RopeScaling,
    YarnRopeScaling,
    long_rope,
    parse_rope,
    rope_from_gguf,
)
from llaisys.models.families.variant import (
    Keys,
    ReadLayout,
    ReadVariant,
    Sizes,
    llama_layout,
    llama_variant,
)
from llaisys.models.families.windows import (
    GgufWindows,
    JsonWindows,
    no_gguf_windows,
    no_windows,
)
from llaisys.models.loading.family import Family, GgufContents
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.gguf_file import prediction_layers
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
from llaisys.models.loading.recommended_sampling import (
    gguf_model_name,
    gguf_sampling_fields,
    model_sampling,
)
from llaisys.models.loading.tensor_source import TensorSource

_END_KEYS = ("eos", "eot", "eom")  # GGUF metadata: tokens that end a turn
MIN_EPSILON = 1e-30  # of norms; the native library needs a value above 0 in f32


@dataclass(frozen=True, slots=True)
class DecoderFamily(Family):
    """A decoder like Llama: RMS norm, RoPE, grouped-query attention and SwiGLU. The fields are the
    differences."""

    name: str
    attention_bias: bool | None = None  # q, k, v have a bias; None: config's 'attention_bias'
    output_bias: bool = False  # o has a bias if q, k and v have one
    qk_norm: bool = False  # RMS norm per head of q and k before RoPE
    qk_norm_key: str = ""  # of config.json: whether there is one; '': qk_norm
    windows: JsonWindows = no_windows
    gguf_windows: GgufWindows = no_gguf_windows
    variant: ReadVariant = llama_variant  # norms, MLP and multipliers
    rope_layout: ReadLayout = llama_layout
    experts: ReadExperts = no_experts
    expert_names: ExpertNames = ExpertNames()
    latent: ReadLatent = no_latent  # latent attention
    names: TensorNames = TensorNames()
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys missing in config.json
    bias_key: str = "attention_bias"  # of config.json, for attention_bias None
    epsilon_key: str = "rms_norm_eps"  # of config.json
    activation_keys: tuple[str, ...] = ("hidden_act",)  # of config.json; the first one present
    activations: tuple[str, ...] = ("silu", "swish")
    has_partial_rotary: bool = False  # reads partial_rotary_factor
    has_window_rope: bool = False  # layers with a window have their own RoPE
    adds_one_to_norms: bool = False  # norm weights of Hugging Face files are stored minus 1
    default_head_dim: int | None = None  # without 'head_dim'; None: hidden / heads
    has_gguf_files: bool = True  # under this architecture name
    gguf_architecture: str = ""  # '': name
    is_permuted_in_gguf: bool = False  # rows of q and k are in interleaved RoPE order
    truncates_yarn: bool = True  # rounds the ends of YaRN's ramp; in GGUF files
    gguf_pre_tokenizer: str = "default"

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
        return decoder_tensors.tensors(config)

    def name_from_gguf(self, name: str) -> str | None:
        has_experts = self.experts is not no_experts
        may_norm = self.qk_norm or bool(self.qk_norm_key)
        return decoder_tensors.name_from_gguf(name, may_norm, self.names, has_experts)

    def architecture(self) -> str:
        return self.gguf_architecture or self.name

    def source(self, name: str, config: ModelConfig, is_gguf: bool) -> TensorSource:
        if config.experts is not None:
            found = expert_source(name, config.experts, self.expert_names, is_gguf)
            if found is not None:
                return found
        norm_add = 1.0 if self.adds_one_to_norms and not is_gguf else 0.0
        return source_of(name, config, self.names, norm_add, is_gguf)

    def permuted_heads(self, name: str, config: ModelConfig) -> int | None:
        if not self.is_permuted_in_gguf:
            return None
        if ".self_attn.q_proj." in name:
            return config.num_heads
        return config.num_kv_heads if ".self_attn.k_proj." in name else None

    def config_from_json(self, fields: Fields, generation: Fields) -> ModelConfig:
        fields = Fields({**self.defaults, **fields.values}, fields.where)
        hidden = fields.integer("hidden_size", 1, MAX_HIDDEN)
        layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
        heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
        vocab = fields.integer("vocab_size", 1, MAX_VOCAB)
        keys = Keys(fields, "")
        latent = self.latent(keys)
        if latent is None:
            head_dim, kv_heads = self._head_sizes(fields, hidden, heads)
        else:
            head_dim, kv_heads = latent.head_dim, 1
        sizes = Sizes(hidden, layers, heads, head_dim)
        variant, layout = self.variant(keys, sizes), self.rope_layout(keys, sizes)
        experts = self.experts(keys, sizes)
        self._reject_others(fields, variant.mlp_bias)
        theta, scaling = parse_rope(
            fields, layout.rotary_dim or head_dim, self.has_window_rope, self.has_partial_rotary
        )
        length = longest = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
        if scaling is not None:
            length, longest = scaling.contexts(length)
        window, window_layers = self.windows(fields, layers)
        bias = self.attention_bias
        if bias is None:
            bias = fields.boolean(self.bias_key, False)
        eos = generation.id_list("eos_token_id", vocab) + fields.id_list("eos_token_id", vocab)
        bos = fields.id_list("bos_token_id", vocab) or generation.id_list("bos_token_id", vocab)
        result = ModelConfig(
            model_type=self.name,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=_dense_inner(
                fields.integer("intermediate_size", 1, MAX_INTERMEDIATE), experts, layers
            ),
            vocab_size=vocab,
            rms_norm_eps=fields.number(self.epsilon_key, MIN_EPSILON, 1.0),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=length,
            longest_context=longest,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            attention_bias=bias,
            output_bias=bias and self.output_bias,
            qk_norm=fields.boolean(self.qk_norm_key, False) if self.qk_norm_key else self.qk_norm,
            sliding_window=window,
            window_layers=window_layers,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            bos_token_id=bos[0] if bos else None,
            dtype=stored_dtype(fields),
            generation=model_sampling(parse_generation(generation), fields.where),
            quantization=parse_quantization(fields),
            variant=variant,
            rope=layout,
            experts=experts,
            latent=latent,
        )
        result.check(fields.where)
        return result

    def _head_sizes(self, fields: Fields, hidden: int, heads: int) -> tuple[int, int]:
        """(head size, key/value heads) of config.json."""
        default = self.default_head_dim
        if default is None:
            if not fields.has("head_dim") and hidden % heads:
                raise fields.fail("hidden_size", f"{hidden} is not a multiple of {heads} heads")
            default = hidden // heads
        head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, default)
        return head_dim, fields.integer("num_key_value_heads", 1, MAX_HEADS, heads)

    def config_from_gguf(self, contents: GgufContents) -> ModelConfig:
        if not self.has_gguf_files:
            raise contents.unsupported(self.name)
        fields, tensors = contents.metadata, contents.tensors
        where, arch = fields.where, self.architecture()
        has_count = fields.integer(f"{arch}.expert_count", 0, 1 << 16, 0) > 0
        if has_count and self.experts is no_experts:
            why = f"is not 0; mixtures of experts are not supported in {arch} files"
            raise fields.fail(f"{arch}.expert_count", why)
        hidden = fields.integer(f"{arch}.embedding_length", 1, MAX_HIDDEN)
        heads = fields.integer(f"{arch}.attention.head_count", 1, MAX_HEADS)
        if EMBEDDING not in tensors:
            raise ModelLoadError(f"{where}: tensor 'token_embd.weight' is missing")
        # The embedding determines the vocabulary size: files may pad it.
        vocab = tensors[EMBEDDING].shape[0]
        if vocab > MAX_VOCAB:
            raise ModelLoadError(f"{where}: 'token_embd.weight' has {vocab} rows")
        keys = Keys(fields, arch)
        latent = self.latent(keys)
        if latent is None:
            head_dim = _head_dim(fields, arch, hidden, heads, self.has_partial_rotary)
            kv_heads = fields.integer(f"{arch}.attention.head_count_kv", 1, MAX_HEADS, heads)
        else:
            head_dim, kv_heads = latent.head_dim, 1
        layers = prediction_layers(fields, arch).start
        sizes = Sizes(hidden, layers, heads, head_dim)
        variant, layout = self.variant(keys, sizes), self.rope_layout(keys, sizes)
        experts = self.experts(keys, sizes)
        theta = fields.number(f"{arch}.rope.freq_base", 1e-3, 1e12, 10000.0)
        scaling = _gguf_scaling(contents, arch, theta, layout.rotary_dim or head_dim)
        if isinstance(scaling, YarnRopeScaling):
            scaling = replace(scaling, truncate=self.truncates_yarn)
        window, window_layers = self.gguf_windows(
            fields, f"{arch}.attention.sliding_window", layers
        )
        length = longest = fields.integer(f"{arch}.context_length", 1, MAX_POSITIONS)
        if scaling is not None:
            length, longest = scaling.contexts(length)
        first = "model.layers.0.self_attn"
        epsilon = "layer_norm_rms_epsilon" if variant.norm == "rms" else "layer_norm_epsilon"
        ends = (f"tokenizer.ggml.{key}_token_id" for key in _END_KEYS)
        eos = [fields.integer(key, 0, vocab - 1, None) for key in ends]
        result = ModelConfig(
            model_type=self.name,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=_dense_inner(
                fields.integer(f"{arch}.feed_forward_length", 1, MAX_INTERMEDIATE), experts, layers
            ),
            vocab_size=vocab,
            rms_norm_eps=fields.number(f"{arch}.attention.{epsilon}", MIN_EPSILON, 1.0),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=length,
            longest_context=longest,
            tie_word_embeddings=OUTPUT not in tensors,
            attention_bias=f"{first}.q_proj.bias" in tensors,
            output_bias=f"{first}.o_proj.bias" in tensors,
            qk_norm=f"{first}.q_norm.weight" in tensors if self.qk_norm_key else self.qk_norm,
            sliding_window=window,
            window_layers=window_layers,
            eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
            bos_token_id=fields.integer("tokenizer.ggml.bos_token_id", 0, vocab - 1, None),
            dtype=_compute_dtype(tensors),
            generation=model_sampling(
                parse_generation(gguf_sampling_fields(fields)), gguf_model_name(fields)
            ),
            variant=variant,
            rope=layout,
            experts=experts,
            latent=latent,
        )
        result.check(where)
        return result

    def _reject_others(self, fields: Fields, has_mlp_bias: bool) -> None:
        """Reject settings that change the forward pass under the same model_type."""
        for key in self.activation_keys:
            if fields.has(key):
                act = fields.string(key)
                if act not in self.activations:
                    only = f"only {self.activations[0]!r} is supported"
                    raise fields.fail(key, f"is {act!r}; {only}")
                break
        if fields.boolean("mlp_bias", False) and not has_mlp_bias:
            raise fields.fail("mlp_bias", "is true; a bias in the MLP is not supported")


def _gguf_scaling(
    contents: GgufContents, arch: str, theta: float, rotary_dim: int
) -> RopeScaling | None:
    """From the metadata, from rope_freqs.weight, or from the tensors of LongRoPE."""
    fields, shape = contents.metadata, (rotary_dim // 2,)
    long = contents.read_vector("rope_factors_long.weight", shape)
    short = contents.read_vector("rope_factors_short.weight", shape)
    if long is None or short is None:
        factors = contents.read_vector("rope_freqs.weight", shape)
        return rope_from_gguf(fields, arch, theta, factors)
    prefix = f"{arch}.rope.scaling"
    context = fields.integer(f"{arch}.context_length", 1, MAX_POSITIONS)
    original = fields.integer(f"{prefix}.original_context_length", 1, MAX_POSITIONS, context)
    attention = fields.number(f"{prefix}.attn_factor", 1e-3, 1e3, None)
    return long_rope(fields, short, long, original, context / original, attention)


def _dense_inner(inner: int, experts: Experts | None, layers: int) -> int:
    """Intermediate size of dense layers; without any, that of an expert."""
    return experts.inner if experts is not None and len(experts.layers) == layers else inner


def _head_dim(fields: Fields, arch: str, hidden: int, heads: int, is_partial: bool) -> int:
    key_length = f"{arch}.attention.key_length"
    if not fields.has(key_length) and hidden % heads:
        raise fields.fail(f"{arch}.embedding_length", f"{hidden} is not a multiple of {heads}")
    head_dim = fields.integer(key_length, 2, MAX_HEAD_DIM, hidden // heads)
    others = [f"{arch}.attention.value_length"]
    others += [] if is_partial else [f"{arch}.rope.dimension_count"]
    for key in others:
        found = fields.integer(key, 1, MAX_HEAD_DIM, head_dim)
        if found != head_dim:
            raise fields.fail(key, f"is {found}; only the head size {head_dim} is supported")
    return int(head_dim)


def _compute_dtype(tensors: Mapping[str, GgufTensor]) -> str:
    """The dtype of the first output projection; bf16 for quantised weights."""
    tensor = tensors.get("model.layers.0.self_attn.o_proj.weight")
    name = "" if tensor is None else tensor.type_name
    return {"F32": "f32", "F16": "f16"}.get(name, "bf16")
