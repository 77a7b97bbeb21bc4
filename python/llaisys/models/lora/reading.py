"""Reads this rank's shards of an adapter into native tensors.

Column-parallel layers (q, k, v, gate, up) shard the rows of B, row-parallel ones (o, down) the
columns of A, as the base weights.
"""

from collections.abc import Callable

import numpy as np

from llaisys.common.closing import closed_on_error
from llaisys.common.errors import ModelLoadError
from llaisys.common.parallel import ParallelConfig
from llaisys.models.families.model_config import ModelConfig
from llaisys.models.loading.convert import Array
from llaisys.models.lora.files import LoraFiles, LoraMatrix, LoraPair
from llaisys.models.lora.weights import LoraTensors, LoraWeights
from llaisys.models.sharding import shard_of
from llaisys.models.tensors import tensor_from


def read_lora(
    files: LoraFiles,
    config: ModelConfig,
    parallel: ParallelConfig,
    check: Callable[[], None] = lambda: None,
) -> LoraWeights:
    """Read this rank's shards. Raises ModelLoadError for damaged or changed files. `check` is
    called between tensors and may raise."""
    weights = LoraWeights()
    with closed_on_error(weights):
        for pair in files.pairs:
            check()
            weights.tensors.append(_read_pair(files.where, pair, config, parallel))
    return weights


def _read_pair(
    where: str, pair: LoraPair, config: ModelConfig, parallel: ParallelConfig
) -> LoraTensors:
    linear, size = pair.linear, parallel.tensor_parallel_size
    a, b = _read(where, pair.a), _read(where, pair.b)
    shape = (linear.num_outputs, linear.num_inputs)
    copies = parallel.kv_copies(config.num_kv_heads)
    shard = shard_of(f"{linear.module}.weight", linear.field, shape, size, parallel.rank, copies)
    if shard is not None and shard.dim == 0:
        b = b[shard.index()]
    elif shard is not None:
        a = a[shard.index()]
    first = tensor_from(a, pair.a.dtype)
    with closed_on_error(first):
        second = tensor_from(b, pair.b.dtype)
    return LoraTensors(linear.field, linear.layer, first, second, pair.scale)


def _read(where: str, matrix: LoraMatrix) -> Array:
    values = matrix.read()
    if matrix.dtype == "bf16":
        is_finite = bool(((values & 0x7F80) != 0x7F80).all())
    else:
        is_finite = bool(np.isfinite(values).all())
    if not is_finite:
        raise ModelLoadError(f"{where}: tensor {matrix.name!r} has values that are not finite")
    return values
