"""Random and invalid arguments for test_capi_fuzz.py, and the call that checks the outcome.

C cannot check sizes of arrays: a pointer is NULL or has as many elements as its count (a count that
is rejected before the array is read may be larger). ASan aborts on a read past the end.
"""

from __future__ import annotations

import ctypes
import random
import re
from typing import Any

import numpy as np
from native_helpers import ROOT, SAMPLING_DTYPES, BlockRow, Shape, block_step, set_numbers

from llaisys.libllaisys import types
from llaisys.libllaisys.library import lib
from llaisys.libllaisys.types import (
    LlaisysBatch,
    LlaisysSamplingMetadata,
    LlaisysStepInput,
)

SHAPE = Shape(voc=11, nh=2, nkvh=1, dh=4, maxseq=48)
INT32 = (0, 1, 2, 3, 5, 16, 47, 48, -1, -2, 2**31 - 1, -(2**31))
INT64 = (*INT32, 2**63 - 1, -(2**63), 2**40)
FLOATS = (0.0, 1.0, 0.5, -1.0, 1e30, -1e30, 1e-45, np.inf, -np.inf, np.nan, 0.9, 2.0)
# UBSan ends the process over values that the bits of a C++ enumeration cannot hold.
DTYPES = (*range(24), 99, -1, 2**31 - 1)
DEVICES = (0, 0, 0, 1, 2, 3, 99, -1)
OPERATORS = re.findall(r"LLAISYS_API \w+ (\w+)\(", (ROOT / "include/llaisys/ops.h").read_text())


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.arrays: list[Any] = []  # arrays that a call points to
        self.calls: dict[str, list[int]] = {}  # name -> [succeeded, rejected]

    def one_in(self, n: int) -> bool:
        return self.random.randrange(n) == 0

    def pick(self, values: Any) -> Any:
        return self.random.choice(values)

    def array(self, dtype: Any, n: int, values: Any) -> int | None:
        """Return the address of n values in their own memory, sometimes NULL."""
        if self.one_in(12):
            return None
        made = np.empty(max(0, n), dtype)
        for i in range(len(made)):
            made[i] = self.pick(values)
        self.arrays.append(made)
        return made.ctypes.data

    def call(self, name: str, *arguments: Any) -> int:
        """Make a call that returns a code; a code other than 0 must set the error text."""
        traits = types.LlaisysDataTypeTraits()
        assert lib().llaisysDataTypeGetTraits(77, ctypes.byref(traits)) == types.ERROR_INVALID
        canary = lib().llaisysLastError()
        code = int(getattr(lib(), name)(*arguments))
        self.arrays.clear()
        self.calls.setdefault(name, [0, 0])[code != 0] += 1
        if code != 0:
            text = lib().llaisysLastError()
            assert text and text != canary, f"{name} returned {code} and left no text"
            # Only rows of NaN may raise an internal error.
            assert code != types.ERROR_INTERNAL or b"NaN" in text, f"{name}: {text.decode()}"
        return code


# -- Steps ----------------------------------------------------------------------------------------


def random_step(fuzz: Fuzzer, block: bool) -> LlaisysStepInput:
    if block and not fuzz.one_in(3):
        return nearly_good_block_step(fuzz)
    n = fuzz.pick((1, 1, 2, 3, 7))
    small = (0, 1, 2, 3) if not fuzz.one_in(4) else INT64
    step = LlaisysStepInput(struct_size=ctypes.sizeof(LlaisysStepInput), n_tokens=n)
    step.token_ids = fuzz.array(np.int64, n, range(11) if not fuzz.one_in(6) else INT64)
    if fuzz.one_in(6):
        step.embd = fuzz.array(np.float32, n * SHAPE.hs, FLOATS)
    if fuzz.one_in(2):
        step.positions = fuzz.array(np.int64, n, range(48) if not fuzz.one_in(4) else INT64)
    total = n
    if fuzz.one_in(2):
        counts = np.array([fuzz.pick((1, 1, 1, 2, 3)) for _ in range(n)], np.int32)
        if fuzz.one_in(8):
            counts[fuzz.random.randrange(n)] = fuzz.pick(INT32)
        fuzz.arrays.append(counts)
        step.n_seq_id = counts.ctypes.data
        total = int(counts.astype(np.int64).sum())
    if not 0 <= total < 1000 or fuzz.one_in(12):
        total = fuzz.pick((0, 1, 5))  # as long as n_seq_ids, whatever the sum of n_seq_id
    step.n_seq_ids = total
    step.seq_ids = fuzz.array(np.int64, total, small)
    step.logits = fuzz.array(np.int8, n, (0, 1, -1))
    if block:
        step.n_seq = fuzz.pick((1, 2, 3))
        step.block_table_width = fuzz.pick((1, 2, 4))
        step.slot_mapping = fuzz.array(np.int32, n, INT32)
        step.context_lens = fuzz.array(np.int32, step.n_seq, INT32)
        step.batch_seq_ids = fuzz.array(np.int64, step.n_seq, small)
        step.block_tables = fuzz.array(np.int32, step.n_seq * step.block_table_width, INT32)
    if fuzz.one_in(12):
        step.struct_size = fuzz.pick((0, 4, 8, 2**32 - 1))
    if fuzz.one_in(12):  # rejected before any array is read
        step.n_tokens = fuzz.pick((0, -1, -(2**31), 2**31 - 1, 49))
    return step


def nearly_good_block_step(fuzz: Fuzzer) -> LlaisysStepInput:
    """Return a valid step with at most one value changed."""
    blocks = fuzz.random.sample(range(12), 6)
    rows = [
        BlockRow(fuzz.random.randrange(50) * 2 + r, blocks[3 * r : 3 * r + 3],
                 [fuzz.random.randrange(11) for _ in range(n)], n + fuzz.pick((0, 1, 4)))
        for r, n in enumerate([fuzz.pick((1, 2, 5)) for _ in range(fuzz.pick((1, 2)))])
    ]  # fmt: skip
    given = block_step(rows, 4)
    arrays = {
        "token_ids": np.array(given["tokens"], np.int64),
        "positions": np.array(given["positions"], np.int64),
        "seq_ids": np.array([s[0] for s in given["seqs"]], np.int64),
        "slot_mapping": np.array(given["slot_mapping"], np.int32),
        "context_lens": np.array(given["context_lens"], np.int32),
        "batch_seq_ids": np.array(given["batch_seq_ids"], np.int64),
        "block_tables": np.ascontiguousarray(given["block_tables"]).reshape(-1),
    }
    if fuzz.one_in(2):
        victim = arrays[fuzz.pick(list(arrays))]
        hostile = INT32 if victim.dtype == np.int32 else INT64
        victim[fuzz.random.randrange(len(victim))] = fuzz.pick(hostile)
    fuzz.arrays.append(arrays)
    step = LlaisysStepInput(struct_size=ctypes.sizeof(LlaisysStepInput))
    step.n_tokens = step.n_seq_ids = len(arrays["token_ids"])
    step.n_seq, step.block_table_width = given["n_seq"], given["block_table_width"]
    for name, values in arrays.items():
        setattr(step, name, values.ctypes.data)
    if fuzz.one_in(10):
        setattr(step, fuzz.pick(list(arrays)), None)
    return step


def random_batch(fuzz: Fuzzer) -> LlaisysBatch:
    n = fuzz.pick((1, 2, 4))
    batch = LlaisysBatch(n_tokens=n)
    batch.token = fuzz.array(np.int64, n, range(11) if not fuzz.one_in(6) else INT64)
    if fuzz.one_in(8):
        batch.embd = fuzz.array(np.float32, n * SHAPE.hs, FLOATS)
    if fuzz.one_in(2):
        batch.pos = fuzz.array(np.int64, n, range(48))
    counts = np.array([fuzz.pick((1, 1, 2)) for _ in range(n)], np.int32)
    lists = np.array([fuzz.array(np.int64, int(c), (0, 1, 2, 3, -1)) or 0 for c in counts])
    fuzz.arrays += [counts, lists]
    if fuzz.one_in(8):
        counts[0] = fuzz.pick((0, -1, -(2**31)))
    if fuzz.one_in(2):
        batch.n_seq_id, batch.seq_id = counts.ctypes.data, lists.ctypes.data
    batch.logits = fuzz.array(np.int8, n, (0, 1))
    if fuzz.one_in(10):
        batch.n_tokens = fuzz.pick((0, -1, -(2**31)))
    return batch


# -- Sampling -------------------------------------------------------------------------------------


def random_sampling(fuzz: Fuzzer, n_outputs: int) -> LlaisysSamplingMetadata:
    n = fuzz.random.randrange(0, n_outputs + 2)
    sampling = LlaisysSamplingMetadata(struct_size=ctypes.sizeof(LlaisysSamplingMetadata), n_rows=n)
    good = {
        "rows": range(max(1, n_outputs)), "seq_ids": range(4), "temperature": (0.0, 0.5, 1.0, 2.0),
        "top_p": (0.1, 0.9, 1.0), "min_p": (0.0, 0.1, 1.0), "repetition_penalty": (0.5, 1.0, 2.0),
        "presence_penalty": (-1.0, 0.0, 1.0), "frequency_penalty": (-1.0, 0.0, 1.0),
        "typical_p": (0.2, 1.0), "xtc_probability": (0.0, 0.5, 1.0), "xtc_threshold": (0.1, 1.0),
        "top_n_sigma": (0.0, 1.0, 30.0), "dynatemp_range": (0.0, 0.5), "mirostat": (0, 1, 2),
        "dynatemp_exponent": (0.5, 1.0), "mirostat_mu": (-1.0, 10.0),
        "post_sampling_probs": (0, 1),
        "top_k": (0, 1, 3, 99), "seeds": (0, 1, 2**64 - 1), "positions": (0, 5, 2**40),
        "choices": (0, 1), "n_logprobs": (-1, 0, 2, 11), "mask_rows": (-1, 0, 1),
    }  # fmt: skip
    hostile = fuzz.pick(list(good)) if fuzz.one_in(2) else None
    numbers: dict[str, int | None] = {}
    for name, values in good.items():
        if fuzz.one_in(2):
            continue
        dtype = SAMPLING_DTYPES.get(name, np.float64)
        if name == hostile and name != "seeds":
            values = (*FLOATS, *INT32, 1e300) if dtype == np.float64 else INT32
        address = fuzz.array(dtype, n, values)
        if dtype == np.float64:
            numbers[name] = address
        else:
            setattr(sampling, name, address)
    if fuzz.one_in(10):
        numbers[fuzz.pick(("", "heat", "top_p\n", "n" * 999))] = fuzz.array(np.float64, n, FLOATS)
    set_numbers(sampling, numbers)
    for offsets, parts in (
        ("chain_offsets", [("chain", np.uint8, (0, 1, 2, 3, 4, 5, 6, 7, 8, 200))]),
        ("bias_offsets", [("bias_ids", np.int32, (*range(11), -1, 11)),
                          ("bias_values", np.float32, (0.0, -np.inf, 5.0, np.nan))]),
    ):  # fmt: skip
        if fuzz.one_in(2):
            steps = [fuzz.pick((0, 0, 1, 2)) for _ in range(n)]
            values = np.concatenate([[0], np.cumsum(steps)]).astype(np.int32)
            if fuzz.one_in(8):
                values[fuzz.random.randrange(n + 1)] = fuzz.pick((-1, 60, 3))
            fuzz.arrays.append(values)
            setattr(sampling, offsets, values.ctypes.data)
            for name, dtype, allowed in parts:
                setattr(sampling, name, fuzz.array(dtype, 64, allowed))
    sampling.n_masks = fuzz.pick((0, 2, 2, 2))
    sampling.masks = fuzz.array(np.uint32, sampling.n_masks * 1, (0, 0x7FF, 0xFFFFFFFF, 5))
    if fuzz.one_in(15):
        sampling.n_numbers = -1
    if fuzz.one_in(15):
        sampling.struct_size = 7
    if fuzz.one_in(15):
        sampling.rows = None
        sampling.n_rows = fuzz.pick((-1, -(2**31), 2**31 - 1))
    return sampling
