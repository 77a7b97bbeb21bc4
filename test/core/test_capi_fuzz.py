"""Random and invalid arguments for every C function: no crash, and every failure has a text."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from capi_fuzzer import (
    DEVICES,
    DTYPES,
    FLOATS,
    INT32,
    INT64,
    OPERATORS,
    SHAPE,
    Fuzzer,
    random_batch,
    random_sampling,
    random_step,
)
from native_helpers import BlockRow, MockModel, create_params

from llaisys.libllaisys.handles import Tensor
from llaisys.libllaisys.headers import functions
from llaisys.libllaisys.library import lib
from llaisys.libllaisys.types import (
    LlaisysBatch,
    LlaisysKvStats,
    LlaisysLogprobs,
    LlaisysModelCreateParams,
    LlaisysProfile,
    LlaisysSamplingMetadata,
    LlaisysStepBuffers,
    LlaisysStepInput,
)


def fuzz_model(fuzz: Fuzzer, model: MockModel, block: bool) -> None:
    """Make one random call on a model handle, sometimes on NULL."""
    handle = None if fuzz.one_in(25) else model.handle
    small = (0, 1, 2, 3) if not fuzz.one_in(4) else INT64
    kind = fuzz.random.randrange(13)
    if kind < 3:
        step = random_step(fuzz, block)
        fuzz.call("llaisysModelStep", handle, None if fuzz.one_in(30) else ctypes.byref(step))
    elif kind == 3:
        fuzz.call("llaisysModelDecode", handle, random_batch(fuzz))
    elif kind == 4:
        n_outputs = model.n_outputs
        sampling = random_sampling(fuzz, n_outputs)
        ids = np.full(n_outputs + 2, -7, np.int32)
        code = fuzz.call(
            "llaisysModelSample", handle, None if fuzz.one_in(30) else ctypes.byref(sampling),
            None if fuzz.one_in(30) else ids.ctypes.data,
        )  # fmt: skip
        sampled = ids[: sampling.n_rows] if code == 0 else ids[:0]
        assert ((sampled >= 0) & (sampled < SHAPE.voc)).all() and (ids[len(sampled) :] == -7).all()
        found = LlaisysLogprobs()
        fuzz.call("llaisysModelLogprobs", handle, fuzz.pick(INT32), ctypes.byref(found))
        assert 0 <= lib().llaisysGraphRows(fuzz.pick(INT32), fuzz.pick((0, 1, -1))) <= 512
        counts = [ctypes.c_int64(), ctypes.c_int64()]
        fuzz.call("llaisysModelSampleCounts", handle, ctypes.byref(counts[0]),
                  None if fuzz.one_in(9) else ctypes.byref(counts[1]))  # fmt: skip
    elif kind == 5:
        call = fuzz.pick(("Reset", "Accept"))
        n = fuzz.pick((0, 1, 3))
        tokens = fuzz.array(np.int64, n, range(11) if not fuzz.one_in(4) else INT64)
        count = n if not fuzz.one_in(10) else fuzz.pick((-1, -(2**31)))
        fuzz.call(f"llaisysModelSampler{call}", handle, fuzz.pick(small), tokens, count)
        fuzz.call("llaisysModelSamplerForget", handle, fuzz.pick(small))
        vector = np.full(SHAPE.hs + 1, np.inf, np.float32)
        size = fuzz.pick((SHAPE.hs, SHAPE.hs, 0, -1, 2**40))
        target = None if fuzz.one_in(9) else vector.ctypes.data
        fuzz.call("llaisysModelPooled", handle, fuzz.pick(small), target, size)
        assert np.isinf(vector[-1])
        fuzz.call("llaisysModelPoolForget", handle, fuzz.pick(small))
    elif kind == 6:
        fuzz.call("llaisysModelKvSeqCp", handle, *[fuzz.pick(small) for _ in range(4)])
        fuzz.call("llaisysModelKvSeqAdd", handle, *[fuzz.pick(small) for _ in range(4)])
    elif kind == 7:
        ends = (fuzz.pick(small), fuzz.pick((-1, *small)))
        fuzz.call("llaisysModelKvSeqRm", handle, fuzz.pick(small), *ends)
        if fuzz.one_in(10):
            fuzz.call("llaisysModelKvSeqKeep", handle, fuzz.pick(small))
    elif kind == 8:
        stats = LlaisysKvStats(struct_size=fuzz.pick((ctypes.sizeof(LlaisysKvStats), 0, 4)))
        fuzz.call("llaisysModelKvStats", handle, None if fuzz.one_in(9) else ctypes.byref(stats))
        profile = LlaisysProfile(struct_size=fuzz.pick((ctypes.sizeof(LlaisysProfile), 0, 4)))
        fuzz.call("llaisysModelProfile", handle, ctypes.byref(profile), fuzz.pick((0, 1, -1)))
        capacity = fuzz.pick((0, 1, 7, 300))
        text = ctypes.create_string_buffer(capacity) if capacity else None
        length = ctypes.c_size_t()
        fuzz.call("llaisysModelKvDump", handle, text, capacity, ctypes.byref(length))
    elif kind == 9:
        n = fuzz.pick((0, 1, 3))
        slots = range(48) if not fuzz.one_in(4) else INT32
        src, dst = fuzz.array(np.int32, n, slots), fuzz.array(np.int32, n, slots)
        delta = fuzz.array(np.int64, n, INT64)
        count = n if not fuzz.one_in(10) else fuzz.pick((-1, -(2**31)))
        fuzz.call("llaisysModelKvCopySlots", handle, src, dst, count)
        slots_again = fuzz.array(np.int32, n, range(48))
        delta = fuzz.array(np.int64, n, (0, 1, -3, 40))
        fuzz.call("llaisysModelKvShiftSlots", handle, slots_again, delta, count)
        blocks, fd = fuzz.pick((0, 1, 3, -1, -(2**31))), fuzz.pick((-1, -1, -2, 2**31 - 1))
        fuzz.call("llaisysModelKvReserveHost", handle, blocks, fd)
        fuzz.call("llaisysModelKvToHost", handle, slots_again, dst, count)
        fuzz.call("llaisysModelKvFromHost", handle, slots_again, dst, count)
    elif kind == 10:
        fuzz_replace(fuzz, handle)
        fuzz_lora(fuzz, handle)
    elif kind == 11:
        fuzz_launch(fuzz, handle, block)
    else:
        for name in ("NOutputs", "OutputIds", "GetLogits", "GetHidden", "Type", "Weights"):
            getattr(lib(), f"llaisysModel{name}")(handle)
        lib().llaisysModelGetLogitsIth(handle, fuzz.pick(INT32))
        n = fuzz.pick((0, 1, 3))
        layers = fuzz.array(np.int32, n, range(-1, 3) if not fuzz.one_in(3) else INT32)
        fuzz.call("llaisysModelKeepHidden", handle, layers, n if not fuzz.one_in(9) else -1)
        lib().llaisysModelKvSeqPosMax(handle, fuzz.pick(INT64))
        lib().llaisysModelKvSeqPosMin(handle, fuzz.pick(INT64))
        sizes = [fuzz.pick((1, 2, 5, 0, -1)) for _ in range(3)]
        if fuzz.one_in(4):  # far too many; a single huge size might be allocated
            sizes = [2**31 - 1, fuzz.pick((2, 2**31 - 1)), fuzz.pick((2, 2**31 - 1))]
        lib().llaisysBatchFree(lib().llaisysBatchInit(*sizes))
        fuzz_step_buffers(fuzz)


def fuzz_step_buffers(fuzz: Fuzzer) -> None:
    """Ranges beyond the rows, the blocks or the arrays of a step are rejected."""
    buffers = LlaisysStepBuffers()
    buffers.n_rows, buffers.max_tokens, buffers.max_blocks = 3, 8, 2
    buffers.block_size, buffers.max_step_tokens = 4, 6
    buffers.row_tokens = fuzz.array(np.int64, 24, INT64)
    buffers.row_blocks = fuzz.array(np.int32, 6, INT32)
    buffers.row_seq_ids = fuzz.array(np.int64, 3, INT64)
    buffers.row_lora_slots = fuzz.array(np.int32, 3, INT32)
    for name in ("rows", "starts", "n_tokens", "n_logits"):
        setattr(buffers, name, fuzz.array(np.int64, 3, range(3) if not fuzz.one_in(6) else INT64))
    for name in ("token_ids", "positions", "seq_ids"):
        setattr(buffers, name, fuzz.array(np.int64, 6, (0,)))
    buffers.logits = fuzz.array(np.int8, 6, (0,))
    buffers.lora_slots = fuzz.array(np.int32, 6, (0,))
    buffers.slot_mapping = fuzz.array(np.int32, 6, (0,))
    if fuzz.one_in(10):
        setattr(buffers, fuzz.pick(("row_tokens", "slot_mapping")), None)
    if fuzz.one_in(10):
        buffers.block_size = fuzz.pick((0, -1))
    given = None if fuzz.one_in(30) else ctypes.byref(buffers)
    name = fuzz.pick(("llaisysFillStepTokens", "llaisysFillStepSlots"))
    fuzz.call(name, given, fuzz.pick((0, 1, 2, 3, 4, -1)))


def fuzz_replace(fuzz: Fuzzer, handle: int | None) -> None:
    """Ownership of a tensor moves only on success."""
    good = (SHAPE.voc, SHAPE.hs)
    made = Tensor.create(
        fuzz.pick((good, good, (3,), (SHAPE.hs, SHAPE.voc))), fuzz.pick(("f32", "i8"))
    )
    field = fuzz.pick((b"in_embed", b"in_embed", b"", b"attn_q_w", b"\xff%s%n", None))
    given = None if fuzz.one_in(10) else made.handle
    if made.shape == good and made.dtype == "f32":
        table = SHAPE.table()
        made.load(table.ctypes.data, table.nbytes)
    code = fuzz.call("llaisysModelReplaceWeight", handle, field, fuzz.pick(INT32), given)
    made.release_ownership() if code == 0 else made.close()


def fuzz_lora(fuzz: Fuzzer, handle: int | None) -> None:
    """The caller keeps its tensors."""
    counts = fuzz.pick((0, 1, 4, -1, 2**31 - 1)), fuzz.pick((0, 1, 8, 256, -1, 2**31 - 1))
    fuzz.call("llaisysModelReserveLora", handle, *counts)
    slot, layer = fuzz.pick((0, 1, -1, 2**31 - 1)), fuzz.pick(INT32)
    field = fuzz.pick((b"attn_q_w", b"in_embed", b"", b"\xff%s%n", None))
    with Tensor.create((4, SHAPE.hs), "f32") as a, Tensor.create((SHAPE.hs, 4), "f32") as b:
        given = [None if fuzz.one_in(9) else tensor.handle for tensor in (a, b)]
        fuzz.call("llaisysModelSetLora", handle, slot, field, layer, *given, 0.5)
    fuzz.call("llaisysModelClearLora", handle, slot)


@pytest.mark.parametrize(("layout", "seed"), [(0, 1), (1, 2), (0, 3), (1, 4)])
def test_model_calls(layout: int, seed: int) -> None:
    fuzz = Fuzzer(seed)
    fields = {"kv_cache_capacity_tokens": 48, "kv_cache_layout": layout, "kv_cache_block_size": 4}
    with MockModel(SHAPE, max_batch_tokens=3, **fields) as model:
        for _ in range(2000):
            fuzz_model(fuzz, model, layout == 1)
        check_still_works(model, layout)
    assert fuzz.calls["llaisysModelStep"][0] > 20  # some of them ran
    assert fuzz.calls["llaisysModelStep"][1] > 20
    assert fuzz.calls["llaisysModelSample"][0] > 5
    assert min(fuzz.calls["llaisysModelCollect"]) > 1


def fuzz_launch(fuzz: Fuzzer, handle: int | None, block: bool) -> None:
    """Launch two steps, the second sometimes with tokens of the first; collect both or the last."""
    tickets, kept = [], []
    for _ in range(2):
        step = random_step(fuzz, block)
        sampling = random_sampling(fuzz, fuzz.pick((0, 0, 1)))
        if fuzz.one_in(2):
            size = ctypes.sizeof(LlaisysSamplingMetadata)
            sampling = LlaisysSamplingMetadata(struct_size=size, n_rows=fuzz.pick((0, 1)))
        if fuzz.one_in(3) and step.n_tokens == 1:
            step.token_ids = fuzz.array(np.int64, 1, (-1, -2, -(2**63)))
        kept.append((step, sampling, list(fuzz.arrays)))
        ticket = ctypes.c_int64(fuzz.pick(INT64))
        code = fuzz.call(
            "llaisysModelLaunch", handle, None if fuzz.one_in(30) else ctypes.byref(step),
            None if fuzz.one_in(30) else ctypes.byref(sampling),
            None if fuzz.one_in(30) else ctypes.byref(ticket),
        )  # fmt: skip
        if code == 0:
            tickets.append((ticket.value, sampling.n_rows))
    first = fuzz.pick((0, 0, 1)) if len(tickets) == 2 else 0  # the last one is always collected
    for ticket, n_rows in tickets[first:]:
        ids = np.full(n_rows + 2, -7, np.int32)
        if fuzz.one_in(9):
            fuzz.call("llaisysModelCollect", handle, fuzz.pick((ticket + 99, -1)), ids.ctypes.data)
            fuzz.call("llaisysModelCollect", handle, ticket, None)
        code = fuzz.call("llaisysModelCollect", handle, ticket, ids.ctypes.data)
        sampled = ids[:n_rows] if code == 0 else ids[:0]
        assert ((sampled >= 0) & (sampled < SHAPE.voc)).all() and (ids[len(sampled) :] == -7).all()
        found = LlaisysLogprobs()
        fuzz.call("llaisysModelCollectedLogprobs", handle, fuzz.pick(INT32), ctypes.byref(found))
    if len(tickets) == 2:
        fuzz.call("llaisysModelCollect", handle, tickets[0][0], np.empty(99, np.int32).ctypes.data)


def test_launch_without_a_ticket_launches_nothing() -> None:
    """Its caller could not collect the step, and may free the arrays at once."""
    token = np.array([1], np.int64)
    step = LlaisysStepInput(struct_size=ctypes.sizeof(LlaisysStepInput), n_tokens=1)
    step.token_ids = token.ctypes.data
    sampling = LlaisysSamplingMetadata(struct_size=ctypes.sizeof(LlaisysSamplingMetadata))
    with MockModel(SHAPE, max_batch_tokens=3, kv_cache_capacity_tokens=48) as model:
        arguments = model.handle, ctypes.byref(step), ctypes.byref(sampling)
        assert lib().llaisysModelLaunch(*arguments, None) != 0
        assert lib().llaisysModelKvSeqPosMax(model.handle, 0) == -1
        ticket, ids = ctypes.c_int64(), np.empty(1, np.int32)
        assert lib().llaisysModelLaunch(*arguments, ctypes.byref(ticket)) == 0
        assert lib().llaisysModelCollect(model.handle, ticket, ids.ctypes.data) == 0
        assert lib().llaisysModelKvSeqPosMax(model.handle, 0) == 0


def check_still_works(model: MockModel, layout: int) -> None:
    tokens = [1, 2, 3, 4, 5]
    if layout == 0:
        for seq in range(6):
            model.kv_seq_rm(seq, -1, -1)
        for seq in {i for cell in model.kv_dump().split("seq_ids=[")[1:]
                    for i in cell.split("]")[0].split(", ")}:  # fmt: skip
            model.kv_seq_rm(int(seq), -1, -1)
        got = model.run(tokens)
    else:
        got = model.run_blocks([BlockRow(1, [11, 3], tokens, 5)])
    np.testing.assert_allclose(got[-1], SHAPE.sequence_logits(tokens)[-1], atol=2e-4)


def test_create_params() -> None:
    fuzz = Fuzzer(5)
    made = 0
    for _ in range(400):
        meta = SHAPE.meta()
        for _ in range(fuzz.pick((0, 0, 1, 2))):
            name, kind = fuzz.pick(type(meta)._fields_)
            if name == "layer_windows":  # as long as the largest valid nlayer below
                meta.layer_windows = fuzz.array(np.int64, 16, (0, 1, 8, 2**62, -1))
                continue
            if name == "rope_divisors":  # half of the largest valid dh
                meta.rope_divisors = fuzz.array(np.float32, 64, (1.0, 0.25, 4.0, 0.0, np.nan))
                continue
            if name == "layer_inv_freqs":
                meta.layer_inv_freqs = fuzz.array(np.float32, 16 * 64, (1.0, 0.0, -1.0, np.nan))
                continue
            if name == "moe_layers":
                meta.moe_layers = fuzz.array(np.int64, 16, (0, 1, -1))
                continue
            values: Any = FLOATS if kind is ctypes.c_float else (0, 1, 2, 3, 8, 15, 2**31 - 1)
            setattr(meta, name, fuzz.pick(DTYPES if name == "dtype" else values))
        params = create_params(meta, fuzz.pick(("mock", "mock", "qwen2", "llama", "qwen3")))
        params.kv_cache_capacity_tokens = 48
        for _ in range(fuzz.pick((0, 0, 1, 2))):
            name, kind = fuzz.pick(LlaisysModelCreateParams._fields_)
            if kind is ctypes.c_char_p:
                setattr(params, name, fuzz.pick((None, b"", b"uni", b"mp", b"\xff" * 300)))
            elif name in ("model_type", "device"):
                setattr(params, name, fuzz.pick(DEVICES))
            elif name == "kv_cache_capacity_tokens":
                setattr(params, name, fuzz.pick((0, 1, -1, -(2**63), 2**31, 2**63 - 1)))
            elif name == "n_threads":
                setattr(params, name, fuzz.pick((0, 1, 2, -1, -(2**31))))
            elif name == "meta":
                params.meta = None if fuzz.one_in(2) else params.meta
            elif name == "device_ids":
                params.device_ids = fuzz.array(np.int32, 1, (0, 0, 1, -1))
                params.ndevice = 1
            elif name != "ndevice" or params.device_ids is None:
                setattr(params, name, fuzz.pick([v for v in INT32 if name != "ndevice" or v < 1]))
        bytes_ = None if fuzz.one_in(9) else ctypes.byref(ctypes.c_int64())
        counts = fuzz.pick((0, 1, 4, -1, 2**31 - 1)), fuzz.pick((0, 1, 256, -1, 2**31 - 1))
        fuzz.call("llaisysModelLoraBytes", ctypes.byref(params), *counts, bytes_)
        fuzz.call("llaisysModelScratchBytes", ctypes.byref(params), fuzz.pick(INT32), *counts,
                  bytes_)  # fmt: skip
        handle = lib().llaisysModelCreate(ctypes.byref(params))
        if handle:
            made += 1
            given = LlaisysModelCreateParams()
            assert lib().llaisysModelParams(handle, ctypes.byref(given)) == 0
            lib().llaisysModelDestroy(handle)
        else:
            assert lib().llaisysLastError() and lib().llaisysLastErrorCode() != 0
    assert 50 < made < 400


# -- Tensors and operators ------------------------------------------------------------------------


def test_runtime_calls() -> None:
    fuzz = Fuzzer(8)
    for _ in range(150):
        stream, count = ctypes.c_void_p(), ctypes.c_int32()
        where = None if fuzz.one_in(9) else ctypes.byref(stream)
        threads = fuzz.pick((0, 1, 2, -1, -(2**31)))
        fuzz.call("llaisysStreamCreate", fuzz.pick(DEVICES), fuzz.pick((0, 0, 1, -1)),
                  threads, where)  # fmt: skip
        fuzz.call("llaisysStreamThreads", stream, ctypes.byref(count))
        fuzz.call("llaisysStreamSynchronize", stream)
        fuzz.call("llaisysStreamMakeExact", stream)
        seconds = ctypes.c_double()
        fuzz.call("llaisysBenchParallelRegion", stream, fuzz.pick((0, 1, -1, 5)),
                  None if fuzz.one_in(9) else ctypes.byref(seconds))  # fmt: skip
        assert fuzz.call("llaisysBenchRecord", stream) != 0  # a CPU has no graph capture
        assert fuzz.call("llaisysBenchReplay", stream, fuzz.pick((0, 1, -1)), None) != 0
        assert fuzz.call("llaisysBenchReplay", stream, 1, ctypes.byref(seconds)) != 0
        assert fuzz.call("llaisysBenchProbe", stream, 0, None) != 0  # a real probe takes seconds
        lib().llaisysDeviceCount(fuzz.pick((0, 1, 2, 3)))
        free, total, line = ctypes.c_int64(), ctypes.c_int64(), ctypes.create_string_buffer(64)
        fuzz.call("llaisysDeviceMemory", fuzz.pick(DEVICES), fuzz.pick((0, 0, 1, -1)),
                  None if fuzz.one_in(9) else ctypes.byref(free), ctypes.byref(total))  # fmt: skip
        fuzz.call("llaisysDeviceDescribe", fuzz.pick(DEVICES), fuzz.pick((0, 0, 1, -1)),
                  None if fuzz.one_in(9) else line, fuzz.pick((0, 1, len(line))))  # fmt: skip
        lib().llaisysStreamDestroy(stream)


def test_every_function_is_fuzzed_or_plain() -> None:
    """A new function must be added above or to test_capi_fuzz_tensors.py (or here, when it has no
    invalid arguments)."""
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_capi_fuzz*.py"))
    plain = {
        "llaisysAbiVersion", "llaisysLastErrorCode", "llaisysCpuIsa", "llaisysBatchGetOne",
        "llaisysDataTypeName", "llaisysDataTypeGetTraits", "llaisysLinearWeightCreate",
        "llaisysLinearWeightDestroy",
    }  # fmt: skip
    names = "Data Ndim Shape Strides DataType Device IsContiguous IsMapped".split()
    getters = {f"llaisysTensor{name}" for name in names}
    through = set(OPERATORS) | plain | getters
    for name, _, _ in functions():
        short = name.removeprefix("llaisysModel").removeprefix("Sampler")
        assert name in through or name in text or f'"{short}"' in text, name


def test_last_error_is_per_thread() -> None:
    def elsewhere(found: list[bytes]) -> None:
        found.append(lib().llaisysLastError())
        lib().llaisysModelDecode(None, LlaisysBatch())
        found.append(lib().llaisysLastError())

    lib().llaisysTensorLoad(None, None, 0)
    mine = lib().llaisysLastError()
    found: list[bytes] = []
    thread = threading.Thread(target=elsewhere, args=(found,))
    thread.start()
    thread.join()
    assert found[0] == b"" and found[1] == b"model is NULL"
    assert lib().llaisysLastError() == mine == b"tensor is NULL"
