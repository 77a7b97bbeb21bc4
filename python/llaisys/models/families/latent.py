"""Multi-head latent attention (DeepSeek): hyper-parameters and tensors.

The KV cache has one entry of `rank + rope_dim` values per token and layer. `kv_b_proj` of the files
has the rows of both up-projections, head by head; the model has them apart: `k_b_proj`, transposed
for each head, and `v_b_proj`.
"""

from dataclasses import dataclass

from llaisys.models.loading.fields import MAX_HEAD_DIM, MAX_HIDDEN, Fields
from llaisys.models.loading.shard import TensorSource

MAX_RANK = 1024
EPSILON = 1e-6  # of the norms of latents, in every config

_QUERIES = ("self_attn.q_proj", "self_attn.q_b_proj")
_KV_A = "self_attn.kv_a_proj_with_mqa"
KV_B = "self_attn.kv_b_proj"
K_B, V_B = "self_attn.k_b_proj", "self_attn.v_b_proj"
HEAD_WEIGHTS = ("attn_k_b_w", "attn_v_b_w")  # fields with one matrix per head


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of latent attention."""

    rank: int  # latent values of a token
    q_rank: int  # of the queries' down-projection; 0: queries are one product
    nope_dim: int  # values of a query head without RoPE
    rope_dim: int  # values with RoPE, after the others; the key of these is shared by all heads
    value_dim: int  # of a value head

    @property
    def head_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def entry(self) -> int:
        """Values of a token and layer in the KV cache."""
        return self.rank + self.rope_dim

    def row(self, heads: int) -> int:
        """Values of a token in the buffers of a layer's attention."""
        return (
            self.q_rank
            + self.entry
            + heads * (self.head_dim + self.entry + self.rank + self.value_dim)
        )


def read_latent(fields: Fields) -> Latent:
    rank = fields.integer("kv_lora_rank", 1, MAX_RANK)
    q_rank = fields.integer("q_lora_rank", 0 if fields.arch else 1, MAX_HIDDEN, 0)
    if not fields.arch:
        nope = fields.integer("qk_nope_head_dim", 1, MAX_HEAD_DIM)
        rope = fields.integer("qk_rope_head_dim", 2, MAX_HEAD_DIM)
        return Latent(rank, q_rank, nope, rope, fields.integer("v_head_dim", 1, MAX_HEAD_DIM))
    # Files with one kv_b tensor have the sizes of heads in key_length and value_length.
    suffix = "_mla" if fields.has("attention.key_length_mla") else ""
    rope = fields.integer("rotary_dim", 2, MAX_HEAD_DIM)
    head_dim = fields.integer(f"attention.key_length{suffix}", rope + 1, MAX_HEAD_DIM)
    value_dim = fields.integer(f"attention.value_length{suffix}", 1, MAX_HEAD_DIM)
    return Latent(rank, q_rank, head_dim - rope, rope, value_dim)


def latent_source(
    name: str, latent: Latent, heads: int, is_interleaved: bool, is_gguf: bool
) -> TensorSource | None:
    """Where a tensor of latent attention is, if it is not stored as such; None: elsewhere."""
    prefix, _, rest = name.partition(".self_attn.")
    module = f"self_attn.{rest.removesuffix('.weight')}"
    if module in (K_B, V_B):
        is_key = module == K_B
        nope, both = latent.nope_dim, latent.nope_dim + latent.value_dim
        fused = TensorSource(
            f"{prefix}.{KV_B}.weight",
            rows=None if is_key else (nope, both),
            columns=(0, nope) if is_key else None,
            planes=heads,
            is_transposed=is_key,
        )
        return TensorSource(name, planes=heads, otherwise=fused) if is_gguf else fused
    if not is_interleaved:
        return None
    if module in _QUERIES:
        return TensorSource(name, head_order=_order(latent.nope_dim, latent.rope_dim))
    if module == _KV_A:
        return TensorSource(name, head_order=_order(latent.rank, latent.rope_dim))
    return None


def _order(first: int, rotated: int) -> tuple[int, ...]:
    """Order of rows such that RoPE of the last `rotated` has pairs (i, i + rotated / 2)."""
    end = first + rotated
    return (*range(first), *range(first, end, 2), *range(first + 1, end, 2))
