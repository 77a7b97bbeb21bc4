"""Plans survive the wire; other frames are rejected."""

from __future__ import annotations

import msgspec
import pytest
from engine_fakes import EOS, expected_tokens, greedy, make_engine
from error_helpers import invalid_input
from hypothesis import given, settings
from hypothesis import strategies as st

from llaisys.common.lora import LoraLoad
from llaisys.common.request import Request
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import (
    BlockCopy,
    ContextShift,
    NewSequence,
    SchedulerOutputs,
    TokenLogprobs,
)
from llaisys.engine.wire import decode_plan, encode_plan

SEQUENCE = NewSequence(
    seq_id=7,
    request_id="trace-1#0",
    token_ids=[1, 2, 3],
    num_prompt_tokens=2,
    sampling=SamplingParams(
        n=2, temperature=0.5, top_k=7, logit_bias={3: 1.5}, bad_words=["x"], stop=["a", "b"],
        allowed_token_ids=[1, 2], samplers=["top_k", "temperature"], logprobs=2, max_tokens=9,
    ).with_defaults(None),
    seed=(1 << 64) - 1,
    choice=1,
    stop_token_ids=frozenset({0, 9}),
    bad_words=((4, 5), (6,)),
    lora_slot=3,
)  # fmt: skip
PLAN = SchedulerOutputs(
    step_id=3,
    seq_ids=[7, 9],
    request_ids=["trace-1#0", "b"],
    starts=[0, 12],
    counts=[3, 2],
    samples=[True, True],
    draft_token_ids={9: [5]},
    new_seqs=[SEQUENCE],
    shifts=[ContextShift(9, 4, 8, [3, 4], [11], 1)],
    block_copies=[BlockCopy(5, 2, True), BlockCopy(5, 0, False)],
    new_blocks={7: [1], 9: [4]},
    released_seq_ids=[2],
    lora_loads=[LoraLoad(3, 8)],
    num_prefill_tokens=3,
    num_decode_tokens=2,
    prefill_position=12,
)


def test_plan_survives_the_wire():
    assert decode_plan(encode_plan(PLAN)) == PLAN
    for record in (PLAN, SEQUENCE):  # no field at its default, so that each has crossed
        empty = type(record).__dataclass_fields__
        assert all(getattr(record, name) not in (None, 0, [], {}) for name in empty)


def test_best_tokens_are_unpacked_when_read():
    entry = TokenLogprobs.of(7, -2.5, 3, [(1, -0.5), (2, -1.25)])
    assert entry.top == [(1, -0.5), (2, -1.25)]
    assert entry.with_top(1) == TokenLogprobs.of(7, -2.5, 3, [(1, -0.5)])
    assert entry.with_top(9) == entry and TokenLogprobs.of(7, -2.5, 3).top == []


@pytest.mark.parametrize("frame", [b"", b"\xc1" * 9, b"\x80", b"\x93\x01\x02\x03", b"cos\nsystem"])
def test_invalid_frames_are_rejected(frame):
    with pytest.raises(msgspec.MsgspecError):
        decode_plan(frame)


def test_invalid_parameters_are_rejected():
    frame = encode_plan(PLAN).replace(msgspec.msgpack.encode(0.5), msgspec.msgpack.encode(-0.5))
    with invalid_input("temperature"):
        decode_plan(frame)


@settings(max_examples=20, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=9), min_size=1, max_size=6),
    num_blocks=st.integers(6, 14),
)
def test_remote_worker_samples_the_same_tokens(prompts, num_blocks):
    """Every plan is encoded and decoded, including preemptions."""
    core = make_engine(num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=12).core
    requests = [
        Request(str(i), prompt, greedy(10).with_defaults(None), stop_token_ids=frozenset({EOS}))
        for i, prompt in enumerate(prompts)
    ]
    core.add_requests(requests)
    while core.has_unfinished():
        plan = decode_plan(encode_plan(core.scheduler.schedule()))
        core.executor.execute_model(plan)
        output = core.executor.sample_tokens(plan.step_id)
        core.scheduler.update_from_output(output)
    for request in requests:
        assert request.output_token_ids == expected_tokens(request.prompt_token_ids, 10)
