"""Weight shards of tensor-parallel ranks (002 section 7.1) and layers of pipeline stages.

q, k, v, gate and up are column-parallel (equal ranges of output rows), o and down are row-parallel
(equal ranges of input columns); all other weights are replicated. Fused weights are sharded field
by field, so that no head is split. Two options extend the seed: key/value heads are replicated when
there are more ranks than heads, and the rows of the output matrix can be sharded, where the last
shard may be shorter.
"""

from llaisys.common.errors import InvalidInputError
from llaisys.common.validation import invalid_value
from llaisys.models.base import AdapterOptions
from llaisys.models.loading.shard import Shard

# Field of LlaisysQwen2Weights -> sharded dimension.
SHARD_DIMENSIONS = {
    "attn_q_w": 0, "attn_q_b": 0, "attn_k_w": 0, "attn_k_b": 0, "attn_v_w": 0, "attn_v_b": 0,
    "attn_o_w": 1, "mlp_gate_w": 0, "mlp_up_w": 0, "mlp_up_b": 0, "mlp_down_w": 1,
    "attn_sinks_w": 0, "attn_k_b_w": 0, "attn_v_b_w": 0,
    "moe_gate_w": 0, "moe_up_w": 0, "moe_gate_b": 0, "moe_up_b": 0, "moe_down_w": 1,
    "shared_gate_w": 0, "shared_up_w": 0, "shared_down_w": 1,
}  # fmt: skip


KV_SLOTS = ("attn_k_w", "attn_k_b", "attn_v_w", "attn_v_b")


def shard_of(
    weight_name: str,
    slot: str,
    global_shape: tuple[int, ...],
    tp_size: int,
    tp_rank: int,
    kv_copies: int = 1,
    experts: int = 1,
) -> Shard | None:
    """The shard of a weight on rank `tp_rank` of `tp_size`; None: replicated. `kv_copies`: ranks
    with the same key/value heads. `experts`: stacked weights, each sharded alike."""
    dim = SHARD_DIMENSIONS.get(slot)
    if tp_size == 1 or dim is None:
        return None
    copies = kv_copies if slot in KV_SLOTS else 1
    parts = experts if dim == 0 else 1
    chunk, rest = divmod(global_shape[dim] // parts, tp_size // copies)
    index = tp_rank // copies
    shard = Shard(dim, index * chunk, (index + 1) * chunk, parts)
    if rest or not 0 <= tp_rank < tp_size:
        raise InvalidInputError(
            f"a weight cannot be sharded evenly: weight_name={weight_name} "
            f"global_shape={list(global_shape)} local_shape={list(shard.shape_in(global_shape))} "
            f"tp_size={tp_size} tp_rank={tp_rank}",
            field="tensor_parallel_size",
            value=tp_size,
            limit=f"a divisor of {global_shape[dim]}, dimension {dim} of {weight_name}",
        )
    return shard


def check_divisibility(
    heads: int,
    kv_heads: int,
    width: int,
    options: AdapterOptions,
    expert_widths: tuple[int, int] = (0, 0),
) -> None:
    """Raise unless heads and MLP columns divide evenly by the ranks, as the library does."""
    parallel, size = options.parallel, options.parallel.tensor_parallel_size
    for name, what, count in (
        ("nh", "attention heads", heads),
        ("nkvh", "key/value heads", kv_heads * parallel.kv_copies(kv_heads)),
        ("di", "intermediate columns of the MLP", width),
        ("moe_di", "intermediate columns of an expert", expert_widths[0]),
        ("shared_di", "intermediate columns of the shared experts", expert_widths[1]),
    ):
        if count % size:
            limit = f"a divisor of the model's {count} {what}"
            raise InvalidInputError(
                f"tensor_parallel_size is {size}; it must be {limit}: tp_size={size} "
                f"tp_rank={parallel.tensor_parallel_rank} global_{name}={count} "
                f"local_{name}={count // size} device_id={options.device_ids[parallel.local_rank]}",
                field="tensor_parallel_size",
                value=size,
                limit=limit,
            )


def lm_head_shard(vocab_size: int, tp_size: int, tp_rank: int) -> Shard:
    """The rows of the output matrix on a rank with a vocabulary-parallel head."""
    chunk = -(-vocab_size // tp_size)
    if vocab_size <= (tp_size - 1) * chunk:
        raise InvalidInputError(
            f"vocab_parallel_head: a vocabulary of {vocab_size} in shards of {chunk} leaves the "
            f"last of tensor_parallel_size={tp_size} ranks without a row",
            field="vocab_parallel_head",
            value=True,
            limit=f"off for {tp_size} ranks and a vocabulary of {vocab_size}",
        )
    return Shard(0, tp_rank * chunk, min(vocab_size, (tp_rank + 1) * chunk))


def stage_layers(num_layers: int, num_stages: int, head: float) -> list[range]:
    """The layers of each pipeline stage. `head`: weights of the output matrix, relative to those of
    a layer; stages have about the same weights."""
    if num_stages > num_layers:
        limit = f"at most {num_layers}, the layers of the model"
        raise invalid_value("pipeline_parallel_size", num_stages, limit)
    if num_stages == 1:
        return [range(num_layers)]
    others = num_stages - 1
    last = round((num_layers + head) / num_stages - head)
    last = min(max(1, last), num_layers - others)
    ends = [-(-(num_layers - last) * stage // others) for stage in range(num_stages)]
    return [range(*ends[i : i + 2]) for i in range(others)] + [range(num_layers - last, num_layers)]
