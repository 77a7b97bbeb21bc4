"""Steps in flight of a pipeline: random requests equal those of one stage, and every stage computes
the same tokens."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from async_fakes import SMALL, assert_same, run_random
from engine_fakes import FakeAdapter, expected_tokens, greedy, make_engine, run_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from llaisys.common.types import SchedulerOutputs, StepOutput
from llaisys.engine.config import ParallelConfig
from llaisys.engine.executor import Executor
from llaisys.engine.executor.local import LocalRank
from llaisys.engine.llm_engine import LLMEngine
from llaisys.engine.worker import Worker


class StagesExecutor(Executor):
    """The first and the last stage in this process, with a fake model each."""

    def _init_executor(self) -> None:
        stages = self.config.parallel.pipeline_parallel_size
        self._driver = LocalRank(Worker(self.config, 0, 0))
        self.first = Worker(self.config, stages - 1, stages - 1)
        self.model_info = self.worker.load_model()
        self.first.load_model()
        self.sent: deque[np.ndarray[Any, Any]] = deque()  # tokens of steps, by the first stage
        adapters = self.first.adapter, self.worker.adapter
        first, last = (a for a in adapters if isinstance(a, FakeAdapter))
        first.on_forward = lambda step: self.sent.append(step.token_ids.copy())
        last.on_forward = lambda step: np.testing.assert_array_equal(
            self.sent.popleft(), step.token_ids
        )

    def execute_model(self, outputs: SchedulerOutputs, queued: bool = False) -> None:
        self.first.execute_model(outputs, queued)
        self.worker.execute_model(outputs, queued)

    def sample_tokens(self, step_id: int | None = None, masks: Any = None) -> StepOutput:
        output = self.worker.sample_tokens(step_id, masks)
        self.first.store_tokens(output.step_id, output.sampled)
        return output

    def _call(self, method: str, *_: Any) -> list[Any]:
        raise NotImplementedError

    def shutdown(self) -> None:
        self.worker.close()
        self.first.close()


def make_staged_engine(stages: int, monkeypatch: pytest.MonkeyPatch, **sizes: Any) -> LLMEngine:
    parallel = ParallelConfig(pipeline_parallel_size=stages, distributed_executor_backend="mp")
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "get_class", lambda config: StagesExecutor)
        return make_engine(parallel=parallel, **sizes)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 20), stages=st.integers(2, 4), num_blocks=st.integers(20, 40))
def test_random_requests_equal_one_stage(seed, stages, num_blocks):
    sizes = {**SMALL, "num_blocks": num_blocks}
    with pytest.MonkeyPatch.context() as patch:
        staged = make_staged_engine(stages, patch, **sizes)
    assert_same(run_random(staged, seed), run_random(make_engine(**sizes), seed))
    executor: Any = staged.core.executor
    assert not executor.sent and not executor.worker.num_planned


def test_running_requests_are_divided_among_the_steps_in_flight(monkeypatch):
    engine = make_staged_engine(3, monkeypatch)
    prompts = [[n, n + 1] for n in range(1, 8)]
    assert run_prompts(engine, prompts, greedy(12, ignore_eos=True)) == [
        expected_tokens(prompt, 12, stops=()) for prompt in prompts
    ]
    sizes = [record.batch_size for record in engine.core.steps]
    assert sizes[:3] == [3, 3, 1] and max(sizes) == 3


def test_chunks_of_a_prompt_are_in_several_steps_in_flight(monkeypatch):
    engine = make_staged_engine(2, monkeypatch, max_num_batched_tokens=16)
    prompt = list(range(1, 33))
    engine.submit(prompt, greedy(2, ignore_eos=True))
    engine.step()
    assert engine.debug_state()["steps_in_flight"] == 1
    assert engine.core.steps[-1].num_prefill_tokens == 8
    assert engine.core.scheduler.running[0].num_computed_tokens == 16
    while engine.has_unfinished():
        engine.step()
