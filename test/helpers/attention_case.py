"""A cache with queries of lists of its slots: the attention kernel and a reference in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from native_helpers import Array, Natives, array, normal, op, rounded

from llaisys.libllaisys.handles import Stream


@dataclass
class Case:
    """A cache and query tokens; token i sees entries [begin, end) of the list lists[row]."""

    q: Array  # [n, heads, d]
    k: Array  # [slots, kv_heads, d]
    v: Array
    lists: list[Sequence[int]]  # slots, in blocks of block_size
    seen: list[tuple[int, int, int]]  # (row, begin, end)
    block_size: int = 1
    dtypes: tuple[str, str, str] = ("f32", "f32", "f32")  # of q, the cache and out
    scale: float = 0.3
    soft_cap: float = 0.0
    sinks: Array | None = None  # [heads]

    def rounding(self, roundings: float) -> tuple[str, float]:
        """The dtype and roundings of `assert_close`. Over a bf16 cache queries and weights may be
        rounded to bf16; test/cpp has the exact bound."""
        return ("bf16", 4) if self.dtypes[1] == "bf16" else (self.dtypes[2], roundings)

    def run(self, tokens: Sequence[int] | None = None, stream: Stream | None = None) -> Array:
        """Return the results of these tokens, in this order."""
        chosen = list(range(len(self.q))) if tokens is None else list(tokens)
        width = max(
            (len(entries) + self.block_size - 1) // self.block_size for entries in self.lists
        )
        tables = np.full((len(self.lists), width), -1, np.int32)
        for row, entries in enumerate(self.lists):
            blocks = np.asarray(entries[:: self.block_size]) // self.block_size
            tables[row, : len(blocks)] = blocks
        q_rows, begin, end = np.array([self.seen[t] for t in chosen], np.int32).reshape(-1, 3).T
        q_dtype, kv_dtype, out_dtype = self.dtypes
        with Natives() as native:
            out = native.strided(np.zeros((len(chosen), *self.q.shape[1:])), out_dtype)
            sinks = None if self.sinks is None else native(self.sinks, "f32")
            op("Attention", out, native.strided(self.q[chosen], q_dtype, before=3),
               native(self.k, kv_dtype), native(self.v, kv_dtype), native(q_rows, "i32"),
               native(begin, "i32"), native(end, "i32"), native(tables, "i32"),
               sinks, None, 0, self.block_size, self.scale, self.soft_cap,
               stream=stream)  # fmt: skip
            return array(out)

    def reference(self) -> Array:
        q_dtype, kv_dtype, _ = self.dtypes
        q, k, v = (rounded(self.q, q_dtype), rounded(self.k, kv_dtype), rounded(self.v, kv_dtype))
        slots = [list(self.lists[row][begin:end]) for row, begin, end in self.seen]
        return np.stack(
            [
                naive(q[i], k[s], v[s], self.scale, self.soft_cap, self.sinks)
                for i, s in enumerate(slots)
            ]
        )


def naive(
    q: Array, k: Array, v: Array, scale: float, soft_cap: float = 0.0, sinks: Array | None = None
) -> Array:
    """q [heads, d], k and v [m, kv_heads, d], sinks [heads]."""
    out = np.zeros(q.shape)
    if len(k) == 0:
        return out
    group = q.shape[0] // k.shape[1]
    for h in range(q.shape[0]):
        scores = k[:, h // group].astype(np.float64) @ q[h].astype(np.float64) * scale
        if soft_cap:
            scores = soft_cap * np.tanh(scores / soft_cap)
        extra = np.array([] if sinks is None else [sinks[h]], np.float64)
        largest = np.concatenate([scores, extra]).max()
        weights = np.exp(scores - largest)
        total = weights.sum() + np.exp(extra - largest).sum()
        out[h] = weights @ v[:, h // group].astype(np.float64) / total
    return out


def make_case(
    lengths: Sequence[int],
    per_list: int,
    heads: int,
    kv_heads: int,
    d: int,
    block_size: int = 1,
    seed: int = 0,
    window: int = 0,
    dtypes: tuple[str, str, str] = ("f32", "f32", "f32"),
) -> Case:
    """Make lists of random blocks, queried by their last `per_list` tokens. Other slots are NaN."""
    rng = np.random.default_rng(seed)
    n_blocks = [-(-length // block_size) for length in lengths]
    total = sum(n_blocks) + 3
    blocks = iter(rng.permutation(total).tolist())
    lists, seen = [], []
    for row, length in enumerate(lengths):
        mine = [next(blocks) for _ in range(n_blocks[row])]
        lists.append([mine[e // block_size] * block_size + e % block_size for e in range(length)])
        for end in range(max(0, length - per_list) + 1, length + 1):
            seen.append((row, max(0, end - window) if window else 0, end))
    k, v = normal(total * block_size, kv_heads, d, seed=1), normal(total * block_size, kv_heads, d)
    unseen = np.ones(len(k), bool)
    unseen[[slot for entries in lists for slot in entries]] = False
    k[unseen] = v[unseen] = np.nan
    q = normal(len(seen), heads, d, seed=2)
    return Case(q, k, v, lists, seen, block_size, dtypes, 1 / np.sqrt(d))
