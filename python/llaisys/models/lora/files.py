"""`LoraFiles`: an adapter's matrices, checked against a base model. No tensor data."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from llaisys.common.errors import ModelLoadError
from llaisys.models.families import FAMILIES
from llaisys.models.families.decoder_tensors import tensors, weight_field
from llaisys.models.families.model_config import ModelConfig
from llaisys.models.loading.convert import Array
from llaisys.models.loading.family import Family
from llaisys.models.loading.shard import TensorSource

MAX_RANK = 256  # limit of the native library
# Weights with an adapter in the native library.
FIELDS = (
    *("attn_q_w", "attn_k_w", "attn_v_w", "attn_o_w"),
    *("mlp_gate_w", "mlp_up_w", "mlp_down_w"),
)


@dataclass(frozen=True, slots=True)
class BaseLinear:
    """A linear layer of the base model that an adapter may change."""

    module: str  # "model.layers.0.self_attn.q_proj"
    field: str  # of LlaisysDecoderWeights
    layer: int
    num_outputs: int
    num_inputs: int
    source: TensorSource  # of its weight in the files

    @property
    def source_module(self) -> str:
        """Its module in the files, which may have the rows of several layers."""
        return self.source.name.removesuffix(".weight")


def base_linears(
    config: ModelConfig, family: Family | None = None, is_gguf: bool = False
) -> dict[str, BaseLinear]:
    """The linear layers of a model by module name, in forward order. `family`: of the files; None:
    that of the model."""
    family, found = family or FAMILIES[config.model_type], {}
    for name, shape in tensors(config):
        field, layer = weight_field(name)
        if field in FIELDS and len(shape) == 2:
            module = name.removesuffix(".weight")
            source = family.source(name, config, is_gguf)
            found[module] = BaseLinear(module, field, layer, *shape, source)
    return found


def by_source(linears: Iterable[BaseLinear]) -> dict[str, list[BaseLinear]]:
    """The linear layers by their module in the files."""
    found: dict[str, list[BaseLinear]] = {}
    for linear in linears:
        found.setdefault(linear.source_module, []).append(linear)
    return found


@dataclass(frozen=True, slots=True)
class LoraMatrix:
    """A or B in the adapter's file."""

    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str  # 'f32' | 'f16' | 'bf16' of `read`
    read: Callable[[], Array]  # ModelLoadError when the file has changed since it was opened


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The matrices of one linear layer: y += scale * B (A x)."""

    linear: BaseLinear
    a: LoraMatrix  # [rank, num_inputs]
    b: LoraMatrix  # [num_outputs, rank]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class LoraFiles:
    """An adapter with open headers. Holds no file descriptor."""

    where: str  # path, for errors
    pairs: tuple[LoraPair, ...]

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return max(pair.rank for pair in self.pairs)


def pair_matrices(
    where: str,
    matrices: Mapping[tuple[str, str], LoraMatrix],
    linears: Mapping[str, BaseLinear],
    scale_of: Callable[[str, int], float],
) -> LoraFiles:
    """Check matrices by (module of the files, "A" or "B") and pair them. `scale_of(module,
    rank)`."""
    pairs, sources = [], by_source(linears.values())
    for module in dict.fromkeys(module for module, _ in matrices):
        if module not in sources:
            raise ModelLoadError(
                f"{where}: adapts {module!r}, which is not one of the linear layers of the base "
                "model that LoRA adapters may change"
            )
        for letter in "AB":
            if (module, letter) not in matrices:
                raise ModelLoadError(f"{where}: lora_{letter} of {module!r} is missing")
        a, b = matrices[module, "A"], matrices[module, "B"]
        _check_shapes(where, sources[module], a, b)
        scale = scale_of(module, a.shape[0])
        pairs += [LoraPair(part, a, _rows_of(b, part), scale) for part in sources[module]]
    if not pairs:
        raise ModelLoadError(f"{where}: the adapter has no tensors")
    order = {module: index for index, module in enumerate(linears)}
    pairs.sort(key=lambda pair: order[pair.linear.module])
    return LoraFiles(where, tuple(pairs))


def _check_shapes(where: str, parts: list[BaseLinear], a: LoraMatrix, b: LoraMatrix) -> None:
    num_inputs, num_outputs = parts[0].num_inputs, sum(part.num_outputs for part in parts)
    rank = a.shape[0] if a.shape else 0
    if len(a.shape) != 2 or not 1 <= rank <= MAX_RANK:
        raise ModelLoadError(
            f"{where}: tensor {a.name!r} has shape {list(a.shape)}; expected [rank, "
            f"{num_inputs}] with a rank of 1 to {MAX_RANK}"
        )
    for matrix, shape in ((a, (rank, num_inputs)), (b, (num_outputs, rank))):
        if matrix.shape != shape:
            raise ModelLoadError(
                f"{where}: tensor {matrix.name!r} has shape {list(matrix.shape)}; the base model "
                f"needs {list(shape)}"
            )


def _rows_of(b: LoraMatrix, linear: BaseLinear) -> LoraMatrix:
    """The rows of B for one layer, in the order of the model."""
    source = linear.source
    if source.rows is None and source.head_order is None:
        return b

    def read() -> Array:
        values = b.read()
        if source.rows is not None:
            values = values[slice(*source.rows)]
        if source.head_order is not None:
            heads = values.reshape(-1, len(source.head_order), values.shape[1])
            values = heads[:, list(source.head_order)].reshape(values.shape)
        return np.ascontiguousarray(values)

    return replace(b, shape=(linear.num_outputs, b.shape[1]), read=read)
