#!/usr/bin/env python3
"""Perplexity and KL divergence of every weight format and KV cache dtype, on the CPU and on a GPU.

    scripts/compare_devices.py MODEL --file TEXT [--chunks 8] [--context 512] [--formats Q4_K ...]

MODEL is a Hugging Face directory with plain weights whose columns are multiples of 256. Its linear
weights, embedding and head are encoded in each format in memory, so that both devices load the same
blocks. Chunks are scored as by `llaisys bench perplexity`. Prints a table: perplexity and KL
divergence from the weights in f32 on the CPU, and the KL divergence between the two devices.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from block_encoders import encode

from llaisys.bench.perplexity import Rows, Score, cut, read_tokens, steps_of
from llaisys.common.model_registry import get_adapter_class
from llaisys.libllaisys.handles import block_of
from llaisys.models.base import AdapterOptions
from llaisys.models.device import open_device
from llaisys.models.families import open_checkpoint
from llaisys.models.loading.checkpoint import Checkpoint, TensorBlocks, TensorRecord
from llaisys.models.loading.convert import convert
from llaisys.models.loading.f8_weight import VALUES, F8Weight
from llaisys.models.loading.grouped_weight import GroupedWeight
from llaisys.models.loading.shard import Shard
from llaisys.tokenization import Tokenizer

GGUF = ("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "IQ4_NL", "Q3_K", "Q2_K")
GROUPED = {"I8_G128": (8, 128), "I8_G32": (8, 32), "I4_G128": (4, 128), "I4_G32": (4, 32)}
F8 = ("F8 by row", "F8 by block")
KV = ("KV q8", "KV fp8")


def f8_weight(values: Any, by_row: bool) -> F8Weight:
    n = len(values)
    largest = np.abs(values.reshape(n, -1, 128)).max(2)
    if by_row:
        largest[:] = largest.max(1, keepdims=True)
    else:  # blocks of 128 x 128
        largest = np.repeat([p.max(0) for p in np.array_split(largest, -(-n // 128))], 128, 0)[:n]
    scales = np.maximum(largest / 448, 1e-12).astype(np.float32)
    scaled = values / scales.repeat(128, 1)
    order = np.argsort(VALUES[:127])  # of positive codes
    levels = VALUES[:127][order]
    index = np.searchsorted((levels[1:] + levels[:-1]) / 2, np.abs(scaled))
    q = order[index].astype(np.uint8) | np.where(scaled < 0, 128, 0).astype(np.uint8)
    return F8Weight(q, scales)


def grouped_blocks(values: Any, bits: int, group: int) -> TensorBlocks:
    n, k = values.shape
    parts = values.reshape(n, k // group, group)
    low, top = np.minimum(parts.min(2), 0), (1 << bits) - 1
    scales = np.maximum((np.maximum(parts.max(2), 0) - low) / top, 1e-12).astype(np.float32)
    zeros = np.rint(-low / scales).astype(np.int16)
    q = np.clip(np.rint(parts / scales[..., None]) + zeros[..., None], 0, top)
    codes = q.reshape(n, k).astype(np.uint8)
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    else:
        codes, zeros = codes ^ 0x80, zeros - 128
    return GroupedWeight(codes, scales, zeros, bits, group).blocks("w")


class Encoded(Checkpoint):
    """A checkpoint whose matrices are stored in blocks of one format."""

    def __init__(self, inner: Checkpoint, kind: str) -> None:
        self._inner, self._kind = inner, kind
        self.where, self.family, self.config = inner.where, inner.family, inner.config
        self.tokenizer_source = inner.tokenizer_source

    def names(self) -> tuple[str, ...]:
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def record(self, name: str) -> TensorRecord | None:
        return None if len(self.shape(name)) == 2 else self._inner.record(name)

    def read(self, name: str, dtype: str) -> Any:  # vectors, and matrices that no kernel reads
        values = self._inner.read(name, "f32")
        if values.ndim == 2:
            assert self._kind in F8
            values = f8_weight(values, self._kind == F8[0]).values()
        return convert(values, "f32", dtype)

    def block_type(self, name: str) -> str | None:
        if len(self.shape(name)) != 2:
            return None
        return "F8_G128" if self._kind in F8 else self._kind

    def read_blocks(self, name: str, shard: Shard | None = None) -> TensorBlocks | None:
        values = self._inner.read(name, "f32")
        if self._kind in F8:
            return f8_weight(values, self._kind == F8[0]).blocks(None)
        if self._kind in GROUPED:
            return grouped_blocks(values, *GROUPED[self._kind])
        elements, nbytes = block_of(self._kind.lower())
        rows = encode(values, self._kind)
        return TensorBlocks(self._kind, elements, nbytes, values.shape, rows)

    def close(self) -> None:
        pass


def rows_of(checkpoint: Checkpoint, chunks: Any, options: AdapterOptions) -> list[Rows]:
    """Log-probabilities of the scored tokens, by step."""
    adapter: Any = get_adapter_class(checkpoint.config.model_type).load(checkpoint, options)
    found = []
    with closing(adapter):
        for chunk in chunks:
            for start, stop in steps_of(len(chunk)):
                rows = read_tokens(adapter, chunk, start, stop)
                if start > 0:
                    found.append(rows)
            adapter.native.call("KvSeqRm", 0, 0, -1)
    return found


def score(rows: list[Rows], reference: list[Rows], chunks: Any) -> Score:
    total = Score()
    steps = [(c, *s) for c in chunks for s in steps_of(len(c)) if s[0] > 0]
    for (chunk, start, stop), own, other in zip(steps, rows, reference, strict=True):
        total.add(own, chunk[start + 1 : stop + 1], other)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--file", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda"])
    parser.add_argument("--formats", nargs="+", default=["bf16", *GGUF, *GROUPED, *F8, *KV])
    args = parser.parse_args()
    open_device(args.devices[-1])
    with open_checkpoint(args.model) as checkpoint:
        encoder = Tokenizer.from_source(checkpoint.tokenizer_source)
        chunks = cut(encoder, args.file.read_text(), args.context)[: args.chunks]

        def run(kind: str, device: str) -> list[Rows] | None:
            own: dict[str, Any] = {"device": device, "max_model_len": args.context}
            if kind.startswith("KV "):
                if kind == "KV fp8" and device == "cpu":
                    return None
                own |= {"kv_cache_dtype": kind[3:], "dtype": "bf16"}
            elif kind in ("f32", "bf16"):
                own["dtype"] = kind
            is_encoded = "dtype" not in own
            source = Encoded(checkpoint, kind) if is_encoded else checkpoint
            return rows_of(source, chunks, AdapterOptions(kv_cache_layout="slot", **own))

        reference = run("f32", "cpu")
        assert reference is not None
        plain = score(reference, reference, chunks).report(True)
        print(f"f32: perplexity {plain['perplexity']}, {plain['tokens_scored']} tokens", flush=True)
        names = [n for d in args.devices for n in (f"perplexity {d}", f"KL {d}", f"same best {d}")]
        print("| format | " + " | ".join([*names, "KL between them"]) + " |")
        print("|---" * (len(names) + 2) + "|", flush=True)
        for kind in args.formats:
            cells, found = [], []
            for device in args.devices:
                rows = run(kind, device)
                if rows is None:
                    cells += ["-"] * 3
                    continue
                found.append(rows)
                result = score(rows, reference, chunks).report(True)
                cells += [f"{result['perplexity']:.4f}", f"{result['kl_divergence']:.5f}"]
                cells += [f"{100 * result['top1_agreement']:.1f} %"]
            between = "-"
            if len(found) == 2:
                distance = score(found[1], found[0], chunks).report(True)["kl_divergence"]
                between = f"{distance:.5f}"
            print(f"| {kind} | " + " | ".join([*cells, between]) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
