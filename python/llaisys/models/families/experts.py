"""Mixture of experts: hyper-parameters and tensor names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llaisys.common.errors import ModelLoadError
from llaisys.models.families.variant import Keys, Sizes
from llaisys.models.loading.limits import MAX_INTERMEDIATE, MAX_LAYERS
from llaisys.models.loading.tensor_source import TensorSource

MAX_EXPERTS = 4096
_SIGMOID = 2  # expert_gating_func of GGUF files


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts of some or all layers."""

    count: int  # routed experts of a layer
    used: int  # routed experts of a token
    inner: int  # intermediate size of a routed expert
    layers: tuple[int, ...]  # layers with experts; the others have a dense MLP
    shared_inner: int = 0  # intermediate size of the shared experts together; 0: none
    is_sigmoid: bool = False  # scores of the router: sigmoid; otherwise softmax
    is_renormalised: bool = True  # the weights of a token are divided by their sum
    groups: int = 1
    top_groups: int = 1
    has_score_bias: bool = False  # added to the scores for the selection
    has_bias: bool = False  # of the router and the routed experts
    has_shared_gate: bool = False  # the shared experts are multiplied by a sigmoid
    scale: float = 1.0
    limit: float = 0.0  # clamped SwiGLU
    alpha: float = 0.0

    def check(self, where: str) -> None:
        if not 1 <= self.used <= self.count:
            raise ModelLoadError(
                f"{where}: {self.used} experts of a token are not within 1..{self.count}"
            )


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a family's files within a layer."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    router: str = "gate"
    score_bias: str = "gate.e_score_correction_bias"
    is_score_bias_row: bool = False  # stored as [1, experts]
    # All experts in one tensor: [experts, 2 * inner, hidden] with the rows of gate before those of
    # up, and [experts, hidden, inner].
    gate_up: str = "mlp.experts.gate_up_proj"
    all_down: str = "mlp.experts.down_proj"
    # The layout of gpt-oss: all experts in one tensor, the rows of gate and up in turn, biases
    # `*_bias`; without quantization [experts, hidden, 2 * inner] and [experts, inner, hidden].
    is_interleaved: bool = False


ReadExperts = Callable[[Keys, Sizes], Experts | None]


def no_experts(keys: Keys, sizes: Sizes) -> Experts | None:
    return None


def mixtral_experts(keys: Keys, sizes: Sizes) -> Experts | None:
    """Every layer has experts of `intermediate_size`. GGUF files of Mixtral are those of Llama."""
    count = keys.integer("num_local_experts", "expert_count", MAX_EXPERTS, 0)
    if count == 0:
        return None
    return Experts(
        count=count,
        used=keys.integer("num_experts_per_tok", "expert_used_count", MAX_EXPERTS, 2),
        inner=keys.integer("intermediate_size", "feed_forward_length", MAX_INTERMEDIATE, 0),
        layers=tuple(range(sizes.layers)),
    )


def gguf_experts(
    keys: Keys, sizes: Sizes, is_sigmoid: bool = False, is_renormalised: bool = False
) -> Experts | None:
    """From the metadata of a GGUF file; dense layers first. The arguments apply where the file does
    not say it."""
    fields, arch = keys.fields, keys.arch
    count = fields.integer(f"{arch}.expert_count", 0, MAX_EXPERTS, 0)
    dense = fields.integer(f"{arch}.leading_dense_block_count", 0, MAX_LAYERS, 0)
    if count == 0 or dense >= sizes.layers:
        return None
    inner = fields.integer(f"{arch}.expert_feed_forward_length", 1, MAX_INTERMEDIATE)
    gating = fields.integer(f"{arch}.expert_gating_func", 0, 8, 0)
    groups = fields.integer(f"{arch}.expert_group_count", 1, MAX_EXPERTS, 1)
    shared = inner * fields.integer(f"{arch}.expert_shared_count", 0, MAX_EXPERTS, 0)
    return Experts(
        count=count,
        used=fields.integer(f"{arch}.expert_used_count", 1, MAX_EXPERTS),
        inner=inner,
        layers=tuple(range(dense, sizes.layers)),
        shared_inner=shared,
        is_sigmoid=gating == _SIGMOID if gating else is_sigmoid,
        is_renormalised=fields.boolean(f"{arch}.expert_weights_norm", is_renormalised),
        groups=groups,
        top_groups=fields.integer(f"{arch}.expert_group_used_count", 1, MAX_EXPERTS, groups),
        has_score_bias=gating == _SIGMOID if gating else is_sigmoid,
        scale=fields.number(f"{arch}.expert_weights_scale", 1e-6, 1e6, 1.0),
    )


def expert_source(
    name: str, experts: Experts, names: ExpertNames, is_gguf: bool
) -> TensorSource | None:
    """Where a tensor of a mixture of experts is; None for other tensors."""
    if ".mlp." not in name:
        return None
    prefix, rest = name.split(".mlp.", 1)
    block = f"{prefix}.{names.block}"
    if rest in ("gate.weight", "gate.bias"):
        own = rest.replace("gate", names.router)
        return TensorSource(name if is_gguf else f"{block}.{own}")
    if rest == "gate_score.bias":
        own = name if is_gguf else f"{block}.{names.score_bias}"
        return TensorSource(own, is_vector=names.is_score_bias_row and not is_gguf)
    if rest == "shared_expert_gate.weight":
        return TensorSource(name if is_gguf else f"{block}.{rest}", is_row=True)
    if rest.startswith("shared_expert."):
        own = rest.removeprefix("shared_expert.")
        return TensorSource(name if is_gguf else f"{block}.{names.shared}.{own}")
    if not rest.startswith("experts."):
        return None
    count, inner = experts.count, experts.inner
    is_bias = rest.endswith(".bias")
    if is_gguf:
        return TensorSource(name, planes=count, is_vector=is_bias)
    kind = rest.removeprefix("experts.").rsplit(".", 1)[0]
    if names.is_interleaved:
        return _interleaved_source(f"{block}.experts", kind, is_bias, experts)
    own = {"gate_proj": names.gate, "up_proj": names.up, "down_proj": names.down}[kind]
    parts = tuple(f"{block}.experts.{e}.{own}.weight" for e in range(count))
    # Newer versions of transformers store all experts in one tensor.
    rows = {"gate_proj": (0, inner), "up_proj": (inner, 2 * inner), "down_proj": None}[kind]
    fused = names.all_down if kind == "down_proj" else names.gate_up
    together = TensorSource(f"{prefix}.{fused}", rows, planes=count)
    return TensorSource(parts[0], parts=parts, otherwise=together)


def _interleaved_source(block: str, kind: str, is_bias: bool, experts: Experts) -> TensorSource:
    """Of a family with `ExpertNames.is_interleaved`; `block`: prefix of the experts."""
    name, rows, step = f"{block}.down_proj", None, 1
    if kind != "down_proj":
        name, step = f"{block}.gate_up_proj", 2
        rows = (int(kind == "up_proj"), 2 * experts.inner)
    if is_bias:
        return TensorSource(f"{name}_bias", rows, planes=experts.count, step=step, is_vector=True)
    plain = TensorSource(name, rows, planes=experts.count, step=step, is_transposed=True)
    return TensorSource(f"{block}.{kind}.weight", otherwise=plain)  # the name in MXFP4 files
