"""Tensors of a decoder: their names in Hugging Face files, GGUF files and the native library. The
config determines which of them a model has."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from llaisys.models.families.latent import KV_B, latent_source
from llaisys.models.families.model_config import ModelConfig
from llaisys.models.loading.shard import TensorSource

_GGUF_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A weight of a decoder layer and its optional bias."""

    hf: str  # name within a layer, without '.weight'
    gguf: str
    field: str  # of LlaisysDecoderWeights, without '_w'
    shape: str  # of the sizes in `tensors`
    only_if: str = ""  # key of `_parts`: the layer has this weight
    bias: str = ""  # key of `_parts`: it has a bias


SINKS = "self_attn.sinks"
_SHARED = "mlp.shared_expert"
_POST_NORM = ("post_norms", "post_bias")  # only_if and bias
_EXPERTS = ("experts", "expert_bias")
_LAYER = tuple(
    WeightSpec(*row)
    for row in (
        ("input_layernorm", "attn_norm", "attn_norm", "hidden", "attn_norm", "norm_bias"),
        ("self_attn.q_proj", "attn_q", "attn_q", "q hidden", "q_proj", "attention_bias"),
        ("self_attn.k_proj", "attn_k", "attn_k", "kv hidden", "kv_proj", "attention_bias"),
        ("self_attn.v_proj", "attn_v", "attn_v", "kv hidden", "kv_proj", "attention_bias"),
        ("self_attn.q_a_proj", "attn_q_a", "attn_q_a", "q_rank hidden", "q_rank"),
        ("self_attn.q_a_layernorm", "attn_q_a_norm", "attn_q_a_norm", "q_rank", "q_rank"),
        ("self_attn.q_b_proj", "attn_q_b", "attn_q", "q q_rank", "q_rank"),
        ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa", "attn_kv_a", "entry hidden", "latent"),
        ("self_attn.kv_a_layernorm", "attn_kv_a_norm", "attn_kv_a_norm", "rank", "latent"),
        ("self_attn.k_b_proj", "attn_k_b", "attn_k_b", "head_ranks nope", "latent"),
        ("self_attn.v_b_proj", "attn_v_b", "attn_v_b", "values rank", "latent"),
        ("self_attn.q_norm", "attn_q_norm", "attn_q_norm", "q_norm", "qk_norm"),
        ("self_attn.k_norm", "attn_k_norm", "attn_k_norm", "k_norm", "qk_norm"),
        (SINKS, "attn_sinks", "attn_sinks", "heads", "sinks"),
        ("self_attn.o_proj", "attn_output", "attn_o", "hidden values", "", "output_bias"),
        ("self_attn.post_norm", "post_attention_norm", "attn_post_norm", "hidden", *_POST_NORM),
        ("post_attention_layernorm", "ffn_norm", "mlp_norm", "hidden", "mlp_norm", "norm_bias"),
        ("mlp.gate_proj", "ffn_gate", "mlp_gate", "inner hidden", "dense_gate"),
        ("mlp.up_proj", "ffn_up", "mlp_up", "inner hidden", "dense", "mlp_bias"),
        ("mlp.down_proj", "ffn_down", "mlp_down", "hidden inner", "dense", "mlp_bias"),
        ("mlp.post_norm", "post_ffw_norm", "mlp_post_norm", "hidden", *_POST_NORM),
        ("mlp.gate", "ffn_gate_inp", "moe_router", "experts hidden", *_EXPERTS),
        ("mlp.experts.gate_proj", "ffn_gate_exps", "moe_gate", "expert_rows hidden", *_EXPERTS),
        ("mlp.experts.up_proj", "ffn_up_exps", "moe_up", "expert_rows hidden", *_EXPERTS),
        ("mlp.experts.down_proj", "ffn_down_exps", "moe_down", "output_rows expert", *_EXPERTS),
        (f"{_SHARED}.gate_proj", "ffn_gate_shexp", "shared_gate", "shared hidden", "shared"),
        (f"{_SHARED}.up_proj", "ffn_up_shexp", "shared_up", "shared hidden", "shared"),
        (f"{_SHARED}.down_proj", "ffn_down_shexp", "shared_down", "hidden shared", "shared"),
        (f"{_SHARED}_gate", "ffn_gate_inp_shexp", "shared_scale", "one hidden", "shared_gate"),
    )
)
_SCORE_BIAS = ("mlp.gate_score.bias", "exp_probs_b.bias", "moe_score_b")
STACKED_FIELDS = ("moe_gate_w", "moe_up_w", "moe_down_w")  # rows of all experts
STACKED_SHARDS = (*STACKED_FIELDS, "moe_gate_b", "moe_up_b")  # sharded expert by expert
EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
POSITIONS, TYPES = "model.embed_positions.weight", "model.embed_types.weight"  # of encoders
TABLE_FIELDS = ("pos_embed", "type_embed")  # read by row, never quantised
SCORE = "score."  # prefix of the classifier of an encoder, which is no native weight
# Hugging Face name -> (GGUF name, native weight field)
_GLOBAL = {
    EMBEDDING: ("token_embd.weight", "in_embed"),
    "model.norm.weight": ("output_norm.weight", "out_norm_w"),
    "model.norm.bias": ("output_norm.bias", "out_norm_b"),
    OUTPUT: ("output.weight", "out_embed"),
    POSITIONS: ("position_embd.weight", "pos_embed"),
    TYPES: ("token_types.weight", "type_embed"),
    "model.embed_norm.weight": ("token_embd_norm.weight", "embed_norm_w"),
    "model.embed_norm.bias": ("token_embd_norm.bias", "embed_norm_b"),
}
GLOBAL_NAMES = frozenset(_GLOBAL)  # tensors outside layers
OUTPUT_FIELDS = ("out_norm_w", "out_norm_b", "out_embed")  # after the layers


def tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape) of every tensor that the model needs, in forward order."""
    sizes = {
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "heads": config.num_heads,
        "q": config.num_heads * config.head_dim,
        "kv": config.num_kv_heads * config.head_dim,
        "q_norm": config.head_dim,
        "k_norm": config.head_dim,
        "values": config.num_heads * config.value_dim,
    }
    if config.latent is not None:
        sizes |= {
            "q_rank": config.latent.q_rank,
            "rank": config.latent.rank,
            "entry": config.latent.entry,
            "head_ranks": config.num_heads * config.latent.rank,
            "nope": config.latent.nope_dim,
        }
    experts = config.experts
    if experts is not None:
        sizes |= {
            "experts": experts.count,
            "expert": experts.inner,
            "expert_rows": experts.count * experts.inner,
            "output_rows": experts.count * config.hidden_size,
            "shared": experts.shared_inner,
            "one": 1,
        }
    if config.variant.has_row_norms:
        sizes |= {"q_norm": sizes["q"], "k_norm": sizes["kv"]}
    yield EMBEDDING, (config.vocab_size, config.hidden_size)
    if config.encoder is not None:
        yield POSITIONS, (config.max_position_embeddings, config.hidden_size)
        if config.encoder.token_types:
            yield TYPES, (config.encoder.token_types, config.hidden_size)
        yield "model.embed_norm.weight", (config.hidden_size,)
        yield "model.embed_norm.bias", (config.hidden_size,)
    for layer in range(config.num_layers):
        parts = _parts(config, layer)
        if experts is not None and parts["experts"] and experts.has_score_bias:
            yield f"model.layers.{layer}.{_SCORE_BIAS[0]}", (experts.count,)
        for spec in _LAYER:
            if spec.only_if and not parts[spec.only_if]:
                continue
            shape = tuple(sizes[name] for name in spec.shape.split())
            yield f"model.layers.{layer}.{spec.hf}.weight", shape
            if spec.bias and parts[spec.bias]:
                yield f"model.layers.{layer}.{spec.hf}.bias", shape[:1]
    if config.variant.norm_position != "residual":
        yield "model.norm.weight", (config.hidden_size,)
        if config.variant.norm_bias:
            yield "model.norm.bias", (config.hidden_size,)
    if not config.tie_word_embeddings:
        yield OUTPUT, (config.vocab_size, config.hidden_size)


def _parts(config: ModelConfig, layer: int) -> dict[str, bool]:
    """Which optional weights and biases a layer has."""
    variant, experts, latent = config.variant, config.experts, config.latent
    has_experts = experts is not None and layer in experts.layers
    has_norm = variant.norm_position in ("before", "both")
    has_q_rank = latent is not None and latent.q_rank > 0
    has_gate = variant.mlp not in ("gelu", "gelu_erf")
    return {
        "attn_norm": has_norm,
        "mlp_norm": has_norm and not variant.is_parallel,
        "post_norms": variant.norm_position != "before",
        "post_bias": variant.norm_bias and variant.norm_position == "residual",
        "norm_bias": variant.norm_bias,
        "attention_bias": config.attention_bias,
        "output_bias": config.output_bias,
        "qk_norm": config.qk_norm,
        "sinks": variant.has_sinks,
        "latent": latent is not None,
        "kv_proj": latent is None,
        "q_rank": has_q_rank,
        "q_proj": not has_q_rank,
        "dense": not has_experts,
        "dense_gate": not has_experts and has_gate,
        "mlp_bias": variant.mlp_bias,
        "experts": has_experts,
        "expert_bias": experts is not None and experts.has_bias,
        "shared": experts is not None and has_experts and experts.shared_inner > 0,
        "shared_gate": experts is not None and has_experts and experts.has_shared_gate,
    }


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Tensor names and fused tensors of a family's files, where they differ from Llama's."""

    hf: Mapping[str, str] = field(default_factory=dict)  # name within a layer: ours -> the file's
    gguf: Mapping[str, str] = field(default_factory=dict)  # GGUF name within a layer -> ours
    has_fused_qkv: bool = False  # self_attn.qkv_proj has the rows of q, k and v
    has_fused_gate_up: bool = False  # mlp.gate_up_proj has the rows of gate and up
    has_sinks: bool = False


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def name_from_gguf(name: str, names: TensorNames, has: Mapping[str, bool]) -> str | None:
    """The Hugging Face name of a GGUF tensor; None: not part of a decoder. `has`: keys of `_parts`
    that the family may have or not."""
    for hf, (gguf, _) in _GLOBAL.items():
        if name == gguf:
            return hf
    match = _GGUF_LAYER.fullmatch(name)
    if match is None:
        return None
    own, layer, kind = match[2], f"model.layers.{match[1]}", match[3]
    if own in names.gguf:
        return f"{layer}.{names.gguf[own]}.{kind}"
    if names.has_fused_qkv and own == "attn_qkv":
        return f"{layer}.self_attn.qkv_proj.{kind}"
    if names.has_fused_gate_up and own == "ffn_up":
        return f"{layer}.mlp.gate_up_proj.{kind}"
    if has["experts"] and f"{own}.{kind}" == _SCORE_BIAS[1]:
        return f"{layer}.{_SCORE_BIAS[0]}"
    if has["latent"] and own == "attn_kv_b":  # its two parts are not stored apart
        return f"{layer}.{KV_B}.{kind}"
    for spec in _LAYER:
        if spec.gguf == own and has.get(spec.only_if, True):
            return f"{layer}.{names.hf.get(spec.hf, spec.hf)}.{kind}"
    return None


def source_of(
    name: str, config: ModelConfig, names: TensorNames, norm_add: float, is_gguf: bool
) -> TensorSource:
    """Where the tensor `name` of the model is in the files. `norm_add`: added to norm weights."""
    if config.latent is not None:
        heads, is_interleaved = config.num_heads, config.rope.is_interleaved
        found = latent_source(name, config.latent, heads, is_interleaved, is_gguf)
        return found or TensorSource(name)
    is_norm = name.endswith("norm.weight")
    add = norm_add if is_norm else 0.0
    if name in _GLOBAL:
        return TensorSource(name, add=add)
    _, _, layer, rest = name.split(".", 3)
    hf, kind = rest.rsplit(".", 1)
    prefix, order = f"model.layers.{layer}", None
    if hf in (*QKV[:2], "self_attn.q_norm", "self_attn.k_norm"):
        order = head_order(config)
    q, kv, inner = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.intermediate_size,
    )
    if names.has_fused_qkv and hf in QKV:
        rows = {QKV[0]: (0, q), QKV[1]: (q, q + kv), QKV[2]: (q + kv, q + 2 * kv)}[hf]
        return TensorSource(f"{prefix}.self_attn.qkv_proj.{kind}", rows, order)
    if names.has_fused_gate_up and hf in GATE_UP:
        rows = (0, inner) if hf == GATE_UP[0] else (inner, 2 * inner)
        return TensorSource(f"{prefix}.mlp.gate_up_proj.{kind}", rows)
    if hf == SINKS:  # files of Hugging Face have no suffix
        return TensorSource(name, otherwise=TensorSource(name.removesuffix(".weight")))
    scale = config.q_norm_scale(int(layer)) if hf == "self_attn.q_norm" else 1.0
    return TensorSource(f"{prefix}.{names.hf.get(hf, hf)}.{kind}", None, order, add, scale)


def head_order(config: ModelConfig) -> tuple[int, ...] | None:
    """Order of a head's rows such that RoPE rotates pairs (i, i + head_dim / 2): the rotated pairs
    first, then the other rows, whose frequency is 0. None: the order of the files."""
    d, r = config.head_dim, config.rotary_dim
    is_interleaved = config.rope.is_interleaved
    if d == r and not is_interleaved:
        return None
    step, second = (2, 1) if is_interleaved else (1, r // 2)
    low = [step * i for i in range(r // 2)]
    high = [step * i + second for i in range(r // 2)]
    middle = r + (d - r) // 2
    return (*low, *range(r, middle), *high, *range(middle, d))


def weight_field(name: str) -> tuple[str, int]:
    """(field of LlaisysDecoderWeights, layer) of a Hugging Face tensor name."""
    if name in _GLOBAL:
        return _GLOBAL[name][1], 0
    _, _, layer, rest = name.split(".", 3)
    if rest == _SCORE_BIAS[0]:
        return _SCORE_BIAS[2], int(layer)
    hf, kind = rest.rsplit(".", 1)
    return _FIELDS[hf] + ("_w" if kind == "weight" else "_b"), int(layer)


_FIELDS = {spec.hf: spec.field for spec in _LAYER}
