"""Roles of replicas: which prompts a prefill replica computes, and the simulated effect on GPUs."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llaisys.common.request import Request
from llaisys.common.sampling import SamplingParams
from llaisys.server.engine_client.messages import Submit
from llaisys.server.engine_client.replicas.disaggregation import (
    Disaggregation,
    decode_of,
    prefill_of,
)

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
ROLES = Disaggregation(2, 100)


def submit(length: int, lora: str = "", **sampling: Any) -> Submit:
    params = SamplingParams(**sampling)
    request = Request("r", list(range(length)), params, cache_salt="s", lora=lora, seed=7)
    return Submit.of("r", [request], 30.0)


def test_replicas_of_each_role_and_what_is_left_of_them() -> None:
    assert list(ROLES.decoders({0, 1, 2, 3})) == [2, 3]
    assert set(ROLES.decoders({0, 1})) == {0, 1}  # no decode replica is up
    assert ROLES.prefillers({0, 1, 2, 3}, 3) == [0, 1]
    assert ROLES.prefillers({0, 1}, 0) == [1]
    assert ROLES.prefillers({2, 3}, 3) == []
    assert set(Disaggregation(0, 1).decoders({0, 1})) == {0, 1}
    assert Disaggregation(0, 1).prefillers({0, 1}, 1) == []


def test_only_long_prompts_without_other_needs_are_prefilled_elsewhere() -> None:
    assert ROLES.wants_prefill(submit(100), 0)
    assert not ROLES.wants_prefill(submit(99), 0)
    assert not ROLES.wants_prefill(submit(500), 401)
    assert not ROLES.wants_prefill(submit(500, lora="a"), 0)
    for sampling in ({"prompt_logprobs": 1}, {"max_tokens": 0}):
        assert not ROLES.wants_prefill(submit(500, **sampling), 0)


def test_prefill_and_decode_requests_of_a_prompt() -> None:
    given = submit(200, max_tokens=9, stop_token_ids=[4], priority=3)
    prefill, decode = prefill_of(given), decode_of(given, "unix:/x/kv")
    [first] = prefill.requests()
    assert (first.request_id, first.kv_export, first.generates) == ("r#kv", True, False)
    assert first.prompt_token_ids == given.prompt_token_ids and first.cache_salt == "s"
    assert first.sampling.priority == 3 and not first.stop_token_ids
    [second] = decode.requests()
    assert second.kv_source == "r#kv@unix:/x/kv" and second.seed == 7
    assert second.sampling.max_tokens == 9
    assert decode_of(given, "").kv_source == ""


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("simulate_disaggregation")
    sys.modules.pop("simulate_disaggregation")


def test_simulated_latency_between_tokens_stays_near_idle(simulation: Any) -> None:
    for gpu in simulation.GPUS:
        p99 = []
        for modelled, count, roles in (
            (replace(gpu, prompt=0.0, attention=0.0), 2, Disaggregation(0, 1)),
            (gpu, 4, Disaggregation(2, 64)),
            (gpu, 4, Disaggregation(0, 1)),
        ):
            run = simulation.Simulation(modelled, count, roles, 0)
            run.run(0.35 * 4 / (2452 * gpu.prompt), 40.0)
            assert len(run.latencies) > 10_000
            p99.append(simulation.quantile(run.latencies, 0.99))
        idle, apart, together = p99
        assert apart < 1.25 * idle and together > 5 * idle
