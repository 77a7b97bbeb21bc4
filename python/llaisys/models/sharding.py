"""Which part of each weight a tensor-parallel rank holds (002 section 7.1).

Outputs of q, k, v, gate and up are cut into equal runs of rows, inputs of o and down into equal
runs of columns; everything else is whole on every rank. The slots of a fused weight are cut one by
one, so that heads never cross a border. Two options go beyond the seed: ranks that outnumber the
key/value heads share them, and the rows of the head are cut too, in runs of which the last may be
shorter.
"""

from __future__ import annotations

from llaisys.common.errors import InvalidInputError
from llaisys.models.base import AdapterOptions
from llaisys.models.loading.shard import Shard

# Slot of LlaisysQwen2Weights -> the dimension that is cut.
SHARD_DIMENSIONS = {
    "attn_q_w": 0, "attn_q_b": 0, "attn_k_w": 0, "attn_k_b": 0, "attn_v_w": 0, "attn_v_b": 0,
    "attn_o_w": 1, "mlp_gate_w": 0, "mlp_up_w": 0, "mlp_down_w": 1,
}  # fmt: skip


KV_SLOTS = ("attn_k_w", "attn_k_b", "attn_v_w", "attn_v_b")


def shard_of(
    weight_name: str,
    slot: str,
    global_shape: tuple[int, ...],
    tp_size: int,
    tp_rank: int,
    kv_copies: int = 1,
) -> Shard | None:
    """The part of a weight that `tp_rank` of `tp_size` holds; None: all of it. `kv_copies`: ranks
    that hold the same key/value heads."""
    dim = SHARD_DIMENSIONS.get(slot)
    if tp_size == 1 or dim is None:
        return None
    copies = kv_copies if slot in KV_SLOTS else 1
    chunk, rest = divmod(global_shape[dim], tp_size // copies)
    index = tp_rank // copies
    part = Shard(dim, index * chunk, (index + 1) * chunk)
    if rest or not 0 <= tp_rank < tp_size:
        raise InvalidInputError(
            f"a weight cannot be cut evenly: weight_name={weight_name} "
            f"global_shape={list(global_shape)} local_shape={list(part.shape_in(global_shape))} "
            f"tp_size={tp_size} tp_rank={tp_rank}",
            field="tensor_parallel_size",
            value=tp_size,
            limit=f"a divisor of {global_shape[dim]}, dimension {dim} of {weight_name}",
        )
    return part


def check_divisibility(heads: int, kv_heads: int, width: int, options: AdapterOptions) -> None:
    """Every rank gets as many of these; as the library checks it, with what was set here."""
    parallel, size = options.parallel, options.parallel.tensor_parallel_size
    for name, what, count in (
        ("nh", "attention heads", heads),
        ("nkvh", "key/value heads", kv_heads * parallel.kv_copies(kv_heads)),
        ("di", "columns between the products of an MLP", width),
    ):
        if count % size:
            limit = f"a divisor of the model's {count} {what}"
            raise InvalidInputError(
                f"tensor_parallel_size is {size}; it must be {limit}: tp_size={size} "
                f"tp_rank={parallel.rank} global_{name}={count} local_{name}={count // size} "
                f"device_id={options.device_ids[parallel.local_rank]}",
                field="tensor_parallel_size",
                value=size,
                limit=limit,
            )


def lm_head_shard(vocab_size: int, tp_size: int, tp_rank: int) -> Shard:
    """The rows of the head that a rank holds when it is cut by the vocabulary."""
    chunk = -(-vocab_size // tp_size)
    if vocab_size <= (tp_size - 1) * chunk:
        raise InvalidInputError(
            f"vocab_parallel_head: a vocabulary of {vocab_size} in runs of {chunk} leaves the last "
            f"of tensor_parallel_size={tp_size} ranks without a row",
            field="vocab_parallel_head",
            value=True,
            limit=f"off for {tp_size} ranks and a vocabulary of {vocab_size}",
        )
    return Shard(0, tp_rank * chunk, min(vocab_size, (tp_rank + 1) * chunk))
