#!/usr/bin/env python3
"""Time decode steps and a prefill without LoRA, with one adapter, and with many at random.

    scripts/bench_lora.py [--device cuda] [--shapes qwen2.5-1.5b ...] [--sequences 1 32 256]
                          [--loras 32] [--rank 16] [--context 256] [--prefill 2048]

Native steps with greedy sampling, random weights of a known shape. `one`: every sequence has the
same adapter; `many`: each sequence has one of --loras adapters at random. The three are timed in
turns. Prints one line per size: milliseconds of a step, and the throughput relative to the base.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.libllaisys.arrays import attach_structs
from llaisys.libllaisys.handles import Tensor, device_code, dtype_code
from llaisys.libllaisys.library import choose_library
from llaisys.libllaisys.model_handle import Model
from llaisys.libllaisys.types import (
    MODEL_TYPES,
    LlaisysDecoderMeta,
    LlaisysModelCreateParams,
    LlaisysSamplingMetadata,
    LlaisysSamplingNumber,
    LlaisysStepInput,
)
from llaisys.models.synthetic import SHAPES

BLOCK_SIZE = 16
BLOCK_LAYOUT = 1
BF16_SMALL = 0x3C80  # 1 / 64: the exponent of random weights


class RandomTensors:
    """Tensors cut from one array of random values: bf16 matrices, f32 vectors."""

    def __init__(self, size: int = 1 << 22) -> None:
        rng = np.random.default_rng(0)
        bits = rng.integers(0, 1 << 7, size, np.uint16) | np.uint16(BF16_SMALL)
        self._values = bits | (rng.integers(0, 2, size, np.uint16) << np.uint16(15))

    def __call__(self, *shape: int) -> Tensor:
        count = int(np.prod(shape))
        values = np.resize(self._values, count)
        if len(shape) == 1:  # vectors are f32, as of a loaded checkpoint
            values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        made = Tensor.create(shape, "bf16" if len(shape) > 1 else "f32")
        made.load(values.ctypes.data, values.nbytes)
        return made


class Bench:
    """A decoder of a known shape with random weights and adapters."""

    def __init__(self, shape: str, options: argparse.Namespace) -> None:
        config = SHAPES[shape]
        self.options, self.config = options, config
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        head_dim = config.get("head_dim", hidden // heads)
        self.q, self.kv = heads * head_dim, config["num_key_value_heads"] * head_dim
        self.layers, self.inner = config["num_hidden_layers"], config["intermediate_size"]
        self.hidden = hidden
        meta = LlaisysDecoderMeta(
            dtype=dtype_code("bf16"), nlayer=self.layers, hs=hidden, nh=heads,
            nkvh=config["num_key_value_heads"], dh=head_dim, di=self.inner, maxseq=8192,
            voc=config["vocab_size"], epsilon=1e-6, theta=1e6, end_token=-1,
        )  # fmt: skip
        prefill_blocks = options.prefill // BLOCK_SIZE + options.prompts
        slots = max(max(options.sequences) * (options.context // BLOCK_SIZE + 1), prefill_blocks)
        params = LlaisysModelCreateParams(
            model_type=MODEL_TYPES["qwen3" if config["model_type"] == "qwen3" else "decoder"],
            meta=ctypes.addressof(meta), device=device_code(options.device),
            kv_cache_layout=BLOCK_LAYOUT, kv_cache_block_size=BLOCK_SIZE,
            kv_cache_capacity_tokens=(slots + 1) * BLOCK_SIZE,
            max_batch_tokens=max(2048, options.prefill),
        )  # fmt: skip
        self.model = Model(params)
        self.random = RandomTensors()
        self._load_weights()

    def sizes(self) -> dict[str, tuple[int, int]]:
        """[out, in] of each linear weight of a layer."""
        hidden, inner = self.hidden, self.inner
        return {
            "attn_q_w": (self.q, hidden), "attn_k_w": (self.kv, hidden),
            "attn_v_w": (self.kv, hidden), "attn_o_w": (hidden, self.q),
            "mlp_gate_w": (inner, hidden), "mlp_up_w": (inner, hidden),
            "mlp_down_w": (hidden, inner),
        }  # fmt: skip

    def _load_weights(self) -> None:
        put = self.model.replace_weight
        vocabulary = self.config["vocab_size"]
        put("in_embed", 0, self.random(vocabulary, self.hidden), ("out_embed", 0))
        put("out_norm_w", 0, self.random(self.hidden))
        for layer in range(self.layers):
            put("attn_norm_w", layer, self.random(self.hidden))
            put("mlp_norm_w", layer, self.random(self.hidden))
            for name, (out, width) in self.sizes().items():
                put(name, layer, self.random(out, width))
            if self.config["model_type"] == "qwen2":
                for name, size in (("q", self.q), ("k", self.kv), ("v", self.kv)):
                    put(f"attn_{name}_b", layer, self.random(size))
            if self.config["model_type"] == "qwen3":
                for name in ("q", "k"):
                    put(f"attn_{name}_norm_w", layer, self.random(self.q // self.heads))

    @property
    def heads(self) -> int:
        return int(self.config["num_attention_heads"])

    def load_adapters(self) -> None:
        rank = self.options.rank
        self.model.reserve_lora(self.options.loras, rank)
        for name, (out, width) in self.sizes().items():
            with self.random(rank, width) as a, self.random(out, rank) as b:
                for layer in range(self.layers):
                    for slot in range(self.options.loras):
                        self.model.call(
                            "SetLora", slot, name.encode(), layer, a.handle, b.handle, 0.01
                        )

    def _step(self, step: LlaisysStepInput, rows: int) -> None:
        sampling = LlaisysSamplingMetadata(n_rows=rows)
        entries = attach_structs(sampling, "numbers", LlaisysSamplingNumber, 1)
        temperature = np.zeros(rows)
        entries[0].name, entries[0].values = b"temperature", temperature.ctypes.data
        sampling.n_numbers = 1
        ids = np.zeros(rows, np.int32)
        ticket = self.model.launch(step, sampling)
        if not self.model.collect(ticket, ids.ctypes.data):
            raise RuntimeError("the step was not run")

    def _timed(self, arrays: dict[str, NDArray[Any]], slots: NDArray[np.int32] | None) -> float:
        """Median milliseconds of a step. slots: of the sequences; None: the base model."""
        n_seq = len(arrays["batch_seq_ids"])
        step = LlaisysStepInput(n_tokens=len(arrays["token_ids"]), n_seq=n_seq)
        step.n_seq_ids = step.n_tokens
        step.block_table_width = arrays["block_tables"].shape[1]
        if slots is not None:
            rows = np.repeat(slots, step.n_tokens // n_seq).astype(np.int32)
            arrays = arrays | {"lora_slots": rows}
        for name, values in arrays.items():
            setattr(step, name, values.ctypes.data)
        times: list[float] = []
        limit = time.perf_counter() + self.options.seconds
        clock = time.process_time if self.options.cpu_time else time.perf_counter
        while len(times) < 2 or (time.perf_counter() < limit and len(times) < 200):
            begin = clock()
            self._step(step, n_seq)
            times.append(clock() - begin)
        return 1e3 * statistics.median(times[1:])

    def _sequences(self, n: int, length: int, context: int) -> dict[str, NDArray[Any]]:
        """A step of n sequences, each of `length` tokens after `context` others."""
        width = (context + length - 1) // BLOCK_SIZE + 1
        tables = np.arange(n * width, dtype=np.int32).reshape(n, width)
        positions = np.arange(context, context + length)
        slots = tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        marks = np.zeros((n, length), np.int8)
        marks[:, -1] = 1
        return {
            "token_ids": np.arange(n * length, dtype=np.int64) % 1000 + 7,
            "positions": np.tile(positions.astype(np.int64), n),
            "seq_ids": np.repeat(np.arange(n, dtype=np.int64), length),
            "batch_seq_ids": np.arange(n, dtype=np.int64),
            "logits": marks.reshape(-1),
            "slot_mapping": slots.astype(np.int32).reshape(-1),
            "context_lens": np.full(n, context + length, np.int32),
            "block_tables": tables,
        }

    def compare(self, name: str, n: int, arrays: dict[str, NDArray[Any]]) -> None:
        """Times the base model, one adapter and many in turns; prints medians."""
        chance = np.random.default_rng(1)
        kinds = {
            "base": None,
            "one": np.zeros(n, np.int32),
            "many": chance.integers(0, self.options.loras, n).astype(np.int32),
        }
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(self.options.rounds):
            for kind, slots in kinds.items():
                times[kind].append(self._timed(arrays, slots))
        base = statistics.median(times["base"])
        text = f"{name}: base {base:8.3f} ms"
        for kind in ("one", "many"):
            ms = statistics.median(times[kind])
            text += f"   {kind} {ms:8.3f} ms {100 * base / ms:5.1f} %"
        print(text, flush=True)

    def run(self, shape: str) -> None:
        options = self.options
        self.load_adapters()
        for n in options.sequences:
            arrays = self._sequences(n, 1, options.context)
            self.compare(f"{shape:14} decode {n:4} sequences", n, arrays)
        if options.prefill:
            length = options.prefill // options.prompts
            arrays = self._sequences(options.prompts, length, 0)
            name = f"{shape:14} prefill {options.prompts} x {length} tokens"
            self.compare(name, options.prompts, arrays)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shapes", nargs="+", default=["qwen2.5-1.5b"], choices=list(SHAPES))
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--loras", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=8, help="that share --prefill tokens")
    parser.add_argument("--seconds", type=float, default=0.5, help="per measurement")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time, for one busy core")
    parser.add_argument("--rounds", type=int, default=3, help="of base, one, many")
    options = parser.parse_args()
    choose_library(options.device)
    for shape in options.shapes:
        bench = Bench(shape, options)
        with bench.model:
            bench.run(shape)
    return 0


if __name__ == "__main__":
    sys.exit(main())
