"""Request status: legal transitions, cancellation, no state left."""

from __future__ import annotations

import itertools
import logging

import pytest
from engine_fakes import (
    adapter_of,
    expected_tokens,
    greedy,
    make_engine,
    run_all,
)
from error_helpers import invalid_input, naming

from llaisys.common.errors import ClosedError, InvalidInputError
from llaisys.common.request import TRANSITIONS, IllegalTransitionError, Request, RequestStatus
from llaisys.common.sampling import SamplingParams

S = RequestStatus


def test_statuses_are_those_of_the_seeds_plus_error_and_timeout():
    assert [status.name for status in S] == (
        "WAITING WAITING_FOR_REMOTE_KVS RUNNING PREEMPTED FINISHED_STOPPED FINISHED_LENGTH_CAPPED "
        "FINISHED_ABORTED FINISHED_IGNORED FINISHED_ERROR FINISHED_TIMED_OUT"
    ).split()
    assert {s for s in S if s.finished} == {s for s in S if s.finish_reason is not None}
    assert S.FINISHED_ERROR.finish_reason == "error" and S.FINISHED_STOPPED.finish_reason == "stop"


@pytest.mark.parametrize(("old", "new"), list(itertools.product(S, S)), ids=lambda s: s.value)
def test_only_legal_transitions_are_allowed(old, new, caplog):
    request = Request("r", [1], SamplingParams(), status=old)
    if new in TRANSITIONS[old]:
        request.set_status(new)
        assert request.status is new
        return
    with caplog.at_level(logging.ERROR, "llaisys.engine"), pytest.raises(IllegalTransitionError):
        request.set_status(new)
    assert request.status is old
    assert f"illegal transition {old.value} -> {new.value}" in caplog.text


def test_finished_is_terminal_and_unfinished_requests_can_be_cancelled():
    for status in S:
        if status.finished:
            assert not TRANSITIONS[status]
        else:
            assert {S.FINISHED_ABORTED, S.FINISHED_ERROR} <= TRANSITIONS[status]


def test_every_transition_is_logged(caplog):
    engine = make_engine()
    with caplog.at_level(logging.DEBUG, "llaisys.engine"):
        engine.submit([1, 2], greedy(1), request_id="x")
        run_all(engine)
    moves = [r.getMessage() for r in caplog.records if r.getMessage().startswith("request x:")]
    assert moves == [
        "request x: waiting -> running",
        "request x: running -> finished_length_capped",
    ]


def test_statuses_and_reasons_at_the_end():
    engine = make_engine()
    tokens = expected_tokens([1, 2, 3], 6, stops=())
    length = engine.submit([1, 2, 3], greedy(6, ignore_eos=True))
    stop = engine.submit([1, 2, 3], greedy(6, ignore_eos=True, stop_token_ids=[tokens[2]]))
    outputs = run_all(engine)
    choice = outputs[length].outputs[0]
    assert (choice.status, choice.finish_reason) == (S.FINISHED_LENGTH_CAPPED, "length")
    choice = outputs[stop].outputs[0]
    assert (choice.status, choice.finish_reason) == (S.FINISHED_STOPPED, "stop")
    assert choice.token_ids == tokens[:3] and choice.stop_reason == tokens[2]
    timings = choice.timings
    assert 0 <= timings.queue <= timings.first_token <= timings.total
    assert timings.per_token >= 0


def test_min_tokens_bans_stop_tokens():
    engine = make_engine()
    tokens = expected_tokens([1, 2, 3], 6, stops=())
    name = engine.submit(
        [1, 2, 3], greedy(6, ignore_eos=True, stop_token_ids=[tokens[1]], min_tokens=4)
    )
    output = run_all(engine)[name]
    assert len(output.token_ids) >= 4 and tokens[1] not in output.token_ids[:3]


# ---- cancelling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancel_releases_everything_at_once_and_twice_is_fine(steps):
    engine = make_engine(max_num_batched_tokens=16)
    name = engine.submit(list(range(1, 30)), greedy(20, ignore_eos=True, n=1))
    other = engine.submit([5, 6], greedy(4, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    (part,) = engine.cancel(name)
    assert part.finish_reason == "abort" and part.output.outputs[0].status is S.FINISHED_ABORTED
    assert engine.cancel(name) == [] and engine.cancel("no such request") == []
    assert run_all(engine)[other].token_ids == expected_tokens([5, 6], 4, stops=())
    assert engine.stats()["kv_blocks_used"] == 0


def test_cancel_ends_all_choices():
    engine = make_engine()
    name = engine.submit([1, 2, 3, 4, 5], SamplingParams(n=5, max_tokens=50, ignore_eos=True))
    engine.step()
    parts = engine.cancel(name)
    assert len(parts) == 5 and [part.output is not None for part in parts] == [False] * 4 + [True]
    assert not engine.has_unfinished()


# ---- queue deadlines -----------------------------------------------------------------------------


def requests_of(name: str, n: int = 1) -> list[Request]:
    params = greedy(3, n=n, ignore_eos=True).with_defaults(None)
    return [Request(f"{name}#{i}", [1, 2], params, group=name, choice=i) for i in range(n)]


def test_prompts_not_started_in_time_expire_with_all_choices():
    core = make_engine(max_num_seqs=1).core
    core.add_requests(requests_of("running", 2), deadline=0.0)
    core.step()
    core.add_requests(requests_of("late", 2), deadline=0.0)
    core.add_requests(requests_of("patient"), deadline=float("inf"))
    core.add_requests(requests_of("endless"))
    core.add_requests(requests_of("cancelled"), deadline=0.0)
    core.finish_request("cancelled#0")
    expired = core.expire()
    assert [[r.request_id for r in prompt] for prompt in expired] == [["late#0", "late#1"]]
    assert core.expire() == []
    left = [*core.scheduler.requests]
    assert left == ["running#0", "running#1", "patient#0", "endless#0"]


# ---- the engine's edges --------------------------------------------------------------------------


def test_rejected_input_leaves_no_state():
    engine = make_engine(num_blocks=16)
    good = engine.submit([3, 4], greedy(4, ignore_eos=True))
    for prompt, params in (
        ([], None),
        ("", None),
        ([1, 512], None),
        ([1, -1], None),
        ([1.5], None),
        ([True], None),
        ({"a": 1}, None),
        (3, None),
        (list(range(1, 70)), None),
        ([1, 2], greedy(400)),
        ([1], SamplingParams(allowed_token_ids=[512])),
        ([1], SamplingParams(logit_bias={512: 1.0})),
        ([1], SamplingParams(stop_token_ids=[9999])),
        ([1], "hot"),
    ):
        with pytest.raises(InvalidInputError):
            engine.submit(prompt, params)
    with invalid_input("request_id"):
        engine.submit([1], request_id=good)
    with invalid_input("cache_salt"):
        engine.submit([1], cache_salt="x" * 2000)
    assert run_all(engine)[good].token_ids == expected_tokens([3, 4], 4, stops=())


def test_rejecting_one_choice_rejects_all():
    engine = make_engine()
    engine.submit([1], greedy(2), request_id="a#1")
    with invalid_input("request_id"):
        engine.submit([1], SamplingParams(n=3), request_id="a")
    assert list(engine.core.scheduler.requests) == ["a#1"]
    run_all(engine)


def test_idle_engine_counts_its_blocks():
    engine = make_engine()
    name = engine.submit([1, 2], greedy(1))
    engine.core.scheduler.block_manager.num_blocks += 1  # one more than are free or cached
    with naming(RuntimeError, "1 blocks"):
        run_all(engine)
    assert name


def test_use_after_close():
    engine = make_engine()
    adapter = adapter_of(engine)
    engine.submit([1, 2], greedy(5))
    engine.close()
    engine.close()
    assert adapter.closed
    for call in (
        engine.step,
        engine.profile,
        lambda: engine.submit([1]),
        lambda: engine.cancel(""),
    ):
        with pytest.raises(ClosedError):
            call()


def test_steps_are_recorded():
    engine = make_engine()
    engine.submit([1, 2, 3], greedy(3, ignore_eos=True))
    run_all(engine)
    records = [
        (r.step_id, r.batch_size, r.num_prefill_tokens, r.num_decode_tokens)
        for r in engine.core.steps
    ]
    assert records == [(0, 1, 3, 0), (1, 1, 0, 1), (2, 1, 0, 1)]
    assert all(record.seconds > 0 for record in engine.core.steps)
