"""`DecoderFamily`: the differences between decoder families as data, and their config parsing."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llaisys.common.errors import ModelLoadError
from llaisys.models.families import decoder_tensors
from llaisys.models.families.decoder_tensors import EMBEDDING, OUTPUT, TensorNames, source_of
from llaisys.models.families.experts import ExpertFamily, expert_source
from llaisys.models.families.latent import read_latent
from llaisys.models.families.model_config import ModelConfig
from llaisys.models.families.rope import RopeScaling, parse_rope, rope_from_gguf, rotated_part
from llaisys.models.families.variant import (
    ReadLayout,
    ReadVariant,
    ReadWindows,
    RopeLayout,
    Sizes,
    Variant,
    no_windows,
)
from llaisys.models.loading.family import Family, GgufContents
from llaisys.models.loading.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    Fields,
)
from llaisys.models.loading.gguf_file import prediction_layers
from llaisys.models.loading.gguf_reader import GgufTensor
from llaisys.models.loading.json_config import parse_generation, stored_dtype
from llaisys.models.loading.quantization import parse_quantization
from llaisys.models.loading.recommended_sampling import (
    gguf_model_name,
    gguf_sampling_fields,
    model_sampling,
)
from llaisys.models.loading.shard import TensorSource

_END_KEYS = ("eos", "eot", "eom")  # GGUF metadata: tokens that end a turn
MIN_EPSILON = 1e-30  # of norms; the native library needs a value above 0 in f32


@dataclass(frozen=True, slots=True)
class DecoderFamily(Family):
    """A decoder like Llama: RMS norm, RoPE, grouped-query attention and SwiGLU. The fields are the
    differences."""

    name: str
    about: str = ""  # for the reference page
    attention_bias: bool | None = None  # q, k, v have a bias; None: config's 'attention_bias'
    output_bias: bool = False  # o has a bias if q, k and v have one
    qk_norm: bool = False  # RMS norm per head of q and k before RoPE
    qk_norm_key: str = ""  # of config.json: whether there is one; '': qk_norm
    windows: ReadWindows = no_windows
    variant: Variant | ReadVariant = Variant()  # norms, MLP and multipliers
    rope_layout: RopeLayout | ReadLayout = RopeLayout()
    has_partial_rotary: bool = False  # reads partial_rotary_factor
    has_window_rope: bool = False  # layers with a window have their own RoPE
    has_rope_in_windows_only: bool = False  # if there are layers with a window
    experts: ExpertFamily | None = None
    has_latent: bool = False  # latent attention
    names: TensorNames = TensorNames()
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys missing in config.json
    unsupported: tuple[str, ...] = ()  # keys that must not be set
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # key -> supported values
    bias_key: str = "attention_bias"  # of config.json, for attention_bias None
    epsilon_key: str = "rms_norm_eps"  # of config.json
    activation_keys: tuple[str, ...] = ("hidden_act",)  # of config.json; the first one present
    activations: tuple[str, ...] = ("silu", "swish")
    adds_one_to_norms: bool = False  # norm weights of Hugging Face files are stored minus 1
    has_gguf_files: bool = True  # under this architecture name
    gguf_architecture: str = ""  # '': name
    is_permuted_in_gguf: bool = False  # rows of q and k are in interleaved RoPE order
    truncates_yarn: bool = True  # rounds the ends of YaRN's ramp; in GGUF files
    gguf_pre_tokenizer: str = "default"

    def tensors(self, config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
        return decoder_tensors.tensors(config)

    def name_from_gguf(self, name: str) -> str | None:
        has_experts = self.experts is not None
        has = {
            "qk_norm": self.qk_norm or bool(self.qk_norm_key),
            "sinks": self.names.has_sinks,
            **dict.fromkeys(("latent", "q_rank"), self.has_latent),
            **dict.fromkeys(("experts", "shared", "shared_gate"), has_experts),
        }
        return decoder_tensors.name_from_gguf(name, self.names, has)

    def architecture(self) -> str:
        return self.gguf_architecture or self.name

    def source(self, name: str, config: ModelConfig, is_gguf: bool) -> TensorSource:
        if config.experts is not None and self.experts is not None:
            found = expert_source(name, config.experts, self.experts, is_gguf)
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
        vocab = fields.integer("vocab_size", 1, MAX_VOCAB)
        bias = self.attention_bias
        if bias is None:
            bias = fields.boolean(self.bias_key, False)
        eos = generation.id_list("eos_token_id", vocab) + fields.id_list("eos_token_id", vocab)
        bos = fields.id_list("bos_token_id", vocab) or generation.id_list("bos_token_id", vocab)
        return self._config(
            fields,
            fields.integer("num_hidden_layers", 1, MAX_LAYERS),
            lambda rotary_dim: parse_rope(
                fields, rotary_dim, self.has_window_rope, self.has_partial_rotary
            ),
            vocab_size=vocab,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            attention_bias=bias,
            output_bias=bias and self.output_bias,
            qk_norm=fields.boolean(self.qk_norm_key, False) if self.qk_norm_key else self.qk_norm,
            eos_token_ids=tuple(dict.fromkeys(eos)),
            bos_token_id=bos[0] if bos else None,
            dtype=stored_dtype(fields),
            generation=model_sampling(parse_generation(generation), fields.where),
            quantization=parse_quantization(fields),
        )

    def config_from_gguf(self, contents: GgufContents) -> ModelConfig:
        if not self.has_gguf_files:
            raise contents.unsupported(self.name)
        metadata, tensors, arch = contents.metadata, contents.tensors, self.architecture()
        fields = GgufFields(metadata.values, metadata.where, arch)
        if self.experts is None and fields.integer("expert_count", 0, 1 << 16, 0) > 0:
            why = f"is not 0; mixtures of experts are not supported in {arch} files"
            raise fields.fail("expert_count", why)
        if EMBEDDING not in tensors:
            raise ModelLoadError(f"{fields.where}: tensor 'token_embd.weight' is missing")
        # The embedding determines the vocabulary size: files may pad it.
        vocab = tensors[EMBEDDING].shape[0]
        if vocab > MAX_VOCAB:
            raise ModelLoadError(f"{fields.where}: 'token_embd.weight' has {vocab} rows")
        first = "model.layers.0.self_attn"
        ends = (f"tokenizer.ggml.{key}_token_id" for key in _END_KEYS)
        eos = [metadata.integer(key, 0, vocab - 1, None) for key in ends]
        return self._config(
            fields,
            prediction_layers(metadata, arch).start,
            lambda rotary_dim: rope_from_gguf(
                fields, rotary_dim, self.truncates_yarn, contents.read_vector
            ),
            vocab_size=vocab,
            tie_word_embeddings=OUTPUT not in tensors,
            attention_bias=f"{first}.q_proj.bias" in tensors,
            output_bias=f"{first}.o_proj.bias" in tensors,
            qk_norm=f"{first}.q_norm.weight" in tensors if self.qk_norm_key else self.qk_norm,
            eos_token_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
            bos_token_id=metadata.integer("tokenizer.ggml.bos_token_id", 0, vocab - 1, None),
            dtype=_compute_dtype(tensors),
            generation=model_sampling(
                parse_generation(gguf_sampling_fields(metadata)), gguf_model_name(metadata)
            ),
        )

    def _config(
        self,
        fields: Fields,
        layers: int,
        read_rope: Callable[[int], tuple[float, RopeScaling | None]],
        **own: Any,
    ) -> ModelConfig:
        """The config from keys that both formats have; `own`: the other fields. `read_rope`: theta
        and scaling for the rotated values of a head."""
        self._reject_others(fields)
        hidden = fields.integer("hidden_size", 1, MAX_HIDDEN)
        heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
        latent = read_latent(fields) if self.has_latent else None
        if latent is None:
            head_dim = self._head_dim(fields, hidden, heads)
            kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, heads)
        else:
            head_dim, kv_heads = latent.head_dim, 1
        sizes = Sizes(hidden, layers, heads, head_dim)
        variant = self.variant(fields, sizes) if callable(self.variant) else self.variant
        if not variant.mlp_bias and fields.boolean("mlp_bias", False):
            raise fields.fail("mlp_bias", "is true; a bias in the MLP is not supported")
        rope = self.rope_layout(fields, sizes) if callable(self.rope_layout) else self.rope_layout
        window, window_layers = self.windows(fields, layers)
        if latent is not None:
            rope = replace(rope, rotary_dim=latent.rope_dim)
        elif self.has_partial_rotary and not rope.rotary_dim:
            rope = replace(rope, rotary_dim=rotated_part(fields, head_dim))
        if self.has_rope_in_windows_only and window is not None:
            without = tuple(i for i in range(layers) if i not in window_layers)
            rope = replace(rope, layers_without=without)
        theta, scaling = read_rope(rope.rotary_dim or head_dim)
        length = longest = fields.integer("max_position_embeddings", 1, MAX_POSITIONS)
        if scaling is not None:
            length, longest = scaling.contexts(length)
        inner = fields.integer("intermediate_size", 1, MAX_INTERMEDIATE)
        experts = None if self.experts is None else self.experts.read(fields, layers)
        if experts is not None and len(experts.layers) == layers:  # no dense layers
            inner = experts.inner
        result = ModelConfig(
            model_type=self.name,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=inner,
            rms_norm_eps=fields.number(self.epsilon_key, MIN_EPSILON, 1.0),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=length,
            longest_context=longest,
            sliding_window=window,
            window_layers=window_layers,
            variant=variant,
            rope=rope,
            experts=experts,
            latent=latent,
            **own,
        )
        result.check(fields.where)
        return result

    def _head_dim(self, fields: Fields, hidden: int, heads: int) -> int:
        if not fields.has("head_dim") and hidden % heads:
            raise fields.fail("hidden_size", f"{hidden} is not a multiple of {heads} heads")
        head_dim = int(fields.integer("head_dim", 2, MAX_HEAD_DIM, hidden // heads))
        others = ["attention.value_length"] if fields.arch else []
        others += [] if not fields.arch or self.has_partial_rotary else ["rotary_dim"]
        for key in others:
            found = fields.integer(key, 1, MAX_HEAD_DIM, head_dim)
            if found != head_dim:
                raise fields.fail(key, f"is {found}; only the head size {head_dim} is supported")
        return head_dim

    def _reject_others(self, fields: Fields) -> None:
        """Reject settings that change the forward pass under the same model_type."""
        prefix = f"{fields.arch}." if fields.arch else ""
        for key in self.unsupported:
            value = fields.values.get(prefix + key)
            if value not in (None, False):
                why = f"is {'true' if value is True else value}; it is not supported"
                raise ModelLoadError(f"{fields.where}: {prefix}{key} {why}")
        for key, known in self.choices.items():
            fields.choice(key, known, None)
        for key in self.activation_keys:
            if fields.has(key):
                fields.choice(key, self.activations)
                break


def _compute_dtype(tensors: Mapping[str, GgufTensor]) -> str:
    """The dtype of the first output projection; bf16 for quantised weights."""
    tensor = tensors.get("model.layers.0.self_attn.o_proj.weight")
    name = "" if tensor is None else tensor.type_name
    return {"F32": "f32", "F16": "f16"}.get(name, "bf16")


# GGUF metadata under the names of config.json, so that a family reads both formats alike.
# Key of config.json -> key of GGUF metadata after the architecture, where they differ.
GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    **dict.fromkeys(("layer_norm_eps", "norm_epsilon"), "attention.layer_norm_epsilon"),
    "rope_theta": "rope.freq_base",
    "rotary_dim": "rope.dimension_count",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "rope_local_base_freq": "rope.freq_base_swa",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), "expert_count"),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), "expert_used_count"),
    "moe_num_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), "expert_shared_count"),
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}


class GgufFields(Fields):
    """A name that is not in GGUF_KEYS is a key after the architecture itself."""

    def __init__(self, values: Mapping[str, Any], where: str, arch: str) -> None:
        super().__init__(values, where)
        self.arch = arch

    def key(self, name: str) -> str:
        return f"{self.arch}.{GGUF_KEYS.get(name, name)}"
