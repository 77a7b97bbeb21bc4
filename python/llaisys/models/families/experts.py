"""Mixture of experts: hyper-parameters and tensor names."""

from dataclasses import dataclass
from typing import Any

from llaisys.common.errors import ModelLoadError
from llaisys.models.families.variant import scale_of
from llaisys.models.loading.fields import MAX_INTERMEDIATE, MAX_LAYERS, REQUIRED, Fields
from llaisys.models.loading.shard import TensorSource

MAX_EXPERTS = 4096
_SIGMOID = 2  # expert_gating_func of GGUF files
# Keys of config.json; a config has one of each.
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "moe_k")
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_INNER = "shared_expert_intermediate_size"


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
class ExpertFamily:
    """Experts of a family: what its configs do not say, and the names in its Hugging Face files
    within a layer."""

    inner: int = 0  # default of the intermediate size; 0: that of the dense MLP
    shared_inner: int = 0  # default, likewise of the shared experts
    is_sigmoid: bool = False  # with a bias for the selection
    has_score_bias: bool = False  # with softmax
    is_renormalised: bool = True  # default
    has_bias: bool = False
    has_shared_gate: bool = False
    limit: float = 0.0  # defaults of the clamped SwiGLU
    alpha: float = 0.0
    is_gguf_only: bool = False
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

    def read(self, fields: Fields, layers: int) -> Experts | None:
        """The experts of a config; None: every MLP is dense."""
        count = _first(fields, _COUNTS, 0, 0)
        if count == 0 or (self.is_gguf_only and not fields.arch):
            return None
        if fields.integer("moe_layer_freq", 1, MAX_LAYERS, 1) != 1:
            raise fields.fail("moe_layer_freq", "above 1 is not supported")
        chosen = _expert_layers(fields, layers)
        if not chosen:
            return None
        dense = None if self.inner else fields.integer("intermediate_size", 1, MAX_INTERMEDIATE)
        inner = fields.integer("moe_intermediate_size", 1, MAX_INTERMEDIATE, self.inner or dense)
        shared = inner * _first(fields, _SHARED_COUNTS, 0, 0)
        gating = fields.integer("expert_gating_func", 0, 8, 0)  # GGUF only
        is_sigmoid = gating == _SIGMOID if gating else self.is_sigmoid
        has_groups = fields.string("topk_method", None) != "greedy"
        groups = fields.integer("n_group", 1, MAX_EXPERTS, 1) if has_groups else 1
        top = groups if fields.arch else 1
        return Experts(
            count=count,
            used=_first(fields, _USED, 1),
            inner=inner,
            layers=chosen,
            shared_inner=shared
            or fields.integer(_SHARED_INNER, 0, MAX_INTERMEDIATE, self.shared_inner),
            is_sigmoid=is_sigmoid,
            is_renormalised=fields.boolean("norm_topk_prob", self.is_renormalised),
            groups=groups,
            top_groups=fields.integer("topk_group", 1, MAX_EXPERTS, top) if has_groups else 1,
            has_score_bias=is_sigmoid or self.has_score_bias,
            has_bias=self.has_bias,
            has_shared_gate=self.has_shared_gate,
            scale=fields.number("routed_scaling_factor", 1e-6, 1e6, 1.0),
            limit=scale_of(fields, "swiglu_limit", self.limit),
            alpha=scale_of(fields, "swiglu_alpha", self.alpha),
        )


def _first(fields: Fields, keys: tuple[str, ...], low: int, default: Any = REQUIRED) -> int:
    """The value of the first of `keys` that the config has."""
    key = next((key for key in keys if fields.has(key)), keys[0])
    return int(fields.integer(key, low, MAX_EXPERTS, default))


def _expert_layers(fields: Fields, count: int) -> tuple[int, ...]:
    """Listed in `mlp_layer_types`; else one of so many after the first dense ones, without
    `mlp_only_layers`."""
    kinds = fields.get("mlp_layer_types")
    if kinds is not None:
        is_list = isinstance(kinds, list) and len(kinds) == count
        if not is_list or any(kind not in ("dense", "sparse") for kind in kinds):
            raise fields.fail("mlp_layer_types", f"must be {count} of 'dense' or 'sparse'")
        return tuple(i for i, kind in enumerate(kinds) if kind == "sparse")
    first = _first(fields, ("first_k_dense_replace", "moe_layer_start_index"), 0, 0)
    last = fields.integer("moe_layer_end_index", -1, MAX_LAYERS, -1)
    step = _first(fields, ("decoder_sparse_step", "moe_layer_interval"), 0 if fields.arch else 1, 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise fields.fail("mlp_only_layers", "must be a list of layer numbers")
    end = count if last == -1 else min(count, last + 1)
    return tuple(i for i in range(first, end) if (i + 1) % (step or 1) == 0 and i not in dense)


def expert_source(
    name: str, experts: Experts, names: ExpertFamily, is_gguf: bool
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
    """Of a family with `ExpertFamily.is_interleaved`; `block`: prefix of the experts."""
    name, rows, step = f"{block}.down_proj", None, 1
    if kind != "down_proj":
        name, step = f"{block}.gate_up_proj", 2
        rows = (int(kind == "up_proj"), 2 * experts.inner)
    if is_bias:
        return TensorSource(f"{name}_bias", rows, planes=experts.count, step=step, is_vector=True)
    plain = TensorSource(name, rows, planes=experts.count, step=step, is_transposed=True)
    return TensorSource(f"{block}.{kind}.weight", otherwise=plain)  # the name in MXFP4 files
