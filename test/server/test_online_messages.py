"""Messages between the API process and the engine process."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from error_helpers import invalid_input, naming

from llaisys.common.errors import InvalidInputError
from llaisys.common.request import RequestStatus
from llaisys.common.sampling import FIELDS, SamplingParams
from llaisys.common.types import ModelInfo, PromptLogprobs, StreamOutput, TokenLogprobs, TokenUpdate
from llaisys.engine.input_processor import InputProcessor
from llaisys.processes.channel import encode
from llaisys.server.config import ServerConfig
from llaisys.server.engine_client.deltas import join_outputs, merge_deltas
from llaisys.server.engine_client.link import EngineLink
from llaisys.server.engine_client.messages import (
    EngineStats,
    Finish,
    Heartbeat,
    Outputs,
    Rejected,
    Submit,
    decode_from_engine,
    decode_to_engine,
)


def test_every_sampling_field_crosses_the_wire() -> None:
    params = SamplingParams(
        n=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=-0.2, logit_bias={3: 1.5}, bad_words=["x"],
        allowed_token_ids=[1, 2], seed=(1 << 64) - 1, stop=["a", "b"], stop_token_ids=[4],
        include_stop_str_in_output=True, ignore_eos=True, max_tokens=5, min_tokens=1, logprobs=3,
        n_keep=7, priority=3, timeout=2.5, dynatemp_range=0.5, dynatemp_exponent=2, mirostat=2,
        mirostat_tau=3, mirostat_eta=0.2, dry_multiplier=0.8, dry_base=2, dry_allowed_length=3,
        dry_penalty_last_n=64, dry_sequence_breakers=["."], repeat_last_n=32,
        post_sampling_probs=True,
        skip_special_tokens=False, typical_p=0.9, xtc_probability=0.5, xtc_threshold=0.2,
        samplers=["top_k", "temperature"], top_n_sigma=1.5, thinking_budget=9,
        repetition_detection={"max_pattern_size": 4, "min_count": 3},
        structured_outputs={"choice": ["a", "b"]}, prompt_logprobs=2, logprob_token_ids=[3, 4],
    )  # fmt: skip
    assert set(params.to_wire()) == set(FIELDS) - {"detokenize", "pooling", "second_text"}
    frame = encode(params.to_wire())
    assert SamplingParams.from_wire(msgspec.msgpack.decode(frame)) == params
    pooled = SamplingParams(max_tokens=0, pooling="mean")
    assert pooled.to_wire() == {"max_tokens": 0, "pooling": "mean"}
    silent = SamplingParams(detokenize=False)
    assert silent.to_wire() == {"detokenize": False} and SamplingParams().to_wire() == {}
    with naming(InvalidInputError, "evil"):
        SamplingParams.from_wire({"evil": 1})
    with invalid_input("temperature"):
        SamplingParams.from_wire({"temperature": 101})


def test_token_updates_cross_the_wire() -> None:
    update = TokenUpdate(
        "r1", [5, 6], RequestStatus.FINISHED_STOPPED,
        [TokenLogprobs.of(5, -0.5, 1, [(5, -0.5)])], "x",
        3, 1.5, None, PromptLogprobs(2, [TokenLogprobs.of(6, -1.5, 2, [])]), b"\x00\x00\x80\x3f",
    )  # fmt: skip
    assert msgspec.msgpack.decode(encode(update), type=TokenUpdate) == update


@pytest.mark.parametrize("frame", [b"", b"\x00", b"\xc1" * 9, b"cos\nsystem\n(S'id'\ntR.", b"\x80"])
def test_invalid_frames_are_decode_errors(frame: bytes) -> None:
    for decode in (decode_to_engine, decode_from_engine):
        with pytest.raises(msgspec.MsgspecError):
            decode(frame)


def test_messages_reject_unknown_fields() -> None:
    frame = msgspec.msgpack.encode({"type": "finish", "request_ids": ["a"], "evil": 1})
    with pytest.raises(msgspec.ValidationError):
        decode_to_engine(frame)
    assert decode_to_engine(encode(Finish(["a"]))) == Finish(["a"])


def test_unfetched_deltas_are_merged() -> None:
    parts = deque(
        [
            StreamOutput("r", 0, "a", [1]),
            StreamOutput("r", 0, "b", [2], "stop"),
            StreamOutput("r", 1, "c", [3]),
        ]
    )
    merged = merge_deltas(parts)
    assert (merged.text, merged.token_ids, merged.finish_reason) == ("ab", [1, 2], "stop")
    assert merge_deltas(parts).text == "c" and not parts


def test_submit_is_one_frame_per_prompt() -> None:
    """The prompt is sent once, not once per choice."""
    info = ModelInfo("m", "mock", 512, 2048, (0,), 10, 16)
    entry = InputProcessor(info).process(list(range(1, 400)), SamplingParams(n=64))
    frame = encode(Submit.of("g", entry.requests, None))
    assert len(frame) < 3000
    message = decode_to_engine(frame)
    assert isinstance(message, Submit)
    requests = message.requests()
    assert [r.choice for r in requests] == list(range(64))
    assert dataclasses.asdict(requests[3].sampling) == dataclasses.asdict(entry.params)
    assert time.monotonic() - requests[0].arrival_time < 60


def test_outputs_that_arrive_together_are_joined() -> None:
    running, capped = RequestStatus.RUNNING, RequestStatus.FINISHED_LENGTH_CAPPED
    entry = TokenLogprobs(7, -0.5, 1)
    batches = [
        [TokenUpdate("a", [1], running), TokenUpdate("b", [5], running, [entry])],
        [TokenUpdate("b", [6], running, [entry]), TokenUpdate("a", [2, 3], running)],
        [TokenUpdate("a", [4], capped, stop_reason=4), TokenUpdate("c", [], running)],
        [TokenUpdate("c", [8], running), TokenUpdate("c", [9], running, pooled=b"x")],
    ]
    first, second = Rejected("x", ["x"], "no"), Heartbeat(0.0, 0.0, 0)
    outputs = [Outputs(updates, EngineStats(num_steps=i)) for i, updates in enumerate(batches)]
    messages = [*outputs, first, Outputs([], EngineStats()), second]
    joined, *others = join_outputs(messages)
    assert others == messages[4:]
    assert isinstance(joined, Outputs) and joined.stats.num_steps == 3
    found = [(update.request_id, update.token_ids) for update in joined.updates]
    assert found == [
        ("a", [1, 2, 3, 4]), ("b", [5]), ("b", [6]), ("c", []), ("c", [8]), ("c", [9])
    ]  # fmt: skip
    assert joined.updates[0].status is capped and joined.updates[0].stop_reason == 4


def test_continuous_engine_messages_do_not_starve_tasks(tmp_path: Path) -> None:
    """Queued frames must not block /health and other streams."""
    frames, address = 200, f"ipc://{tmp_path}/out"
    received, seen = [], []

    def handle(message: Any) -> None:
        time.sleep(0.002)
        received.append(message)

    async def run() -> None:
        process: Any = SimpleNamespace(
            input_address=f"ipc://{tmp_path}/in",
            output_address=address,
            popen=SimpleNamespace(poll=lambda: None),
            remove=lambda: None,
        )
        link = EngineLink(ServerConfig(), process, handle, lambda reason: None)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        engine = context.socket(zmq.PUSH)
        engine.set_hwm(0)
        engine.connect(address)
        for _ in range(frames):
            engine.send(encode(Rejected("r", ["r"], "")))
        link.start()
        while len(received) < frames:
            await asyncio.sleep(0)
            seen.append(len(received))
        engine.close(linger=0)
        context.term()
        await link.close()

    asyncio.run(asyncio.wait_for(run(), 30))
    steps = [after - before for before, after in itertools.pairwise(seen)]
    assert max(steps) < 50, max(steps)
