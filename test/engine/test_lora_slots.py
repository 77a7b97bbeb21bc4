"""Device slots of adapters: how many run together, which wait, and that none waits for ever."""

from __future__ import annotations

import pytest
from scheduler_helpers import answer, preempt_latest, step

from llaisys.common.lora import LoraLoad
from llaisys.common.request import Request, RequestStatus
from llaisys.common.sampling import SamplingParams
from llaisys.engine.block_manager import BlockManager
from llaisys.engine.config import SchedulerConfig
from llaisys.engine.lora_slots import MAX_PASSES
from llaisys.engine.scheduler import RequestScheduler

PROMPT = list(range(9))


def make(slots: int, blocks: int = 512, max_num_seqs: int = 8) -> RequestScheduler:
    config = SchedulerConfig(max_num_seqs, 256)
    return RequestScheduler(config, BlockManager(blocks, 4), 200, num_lora_slots=slots)


def add(
    scheduler: RequestScheduler, name: str, lora_id: int, max_tokens: int = 4, first: int = 0
) -> Request:
    prompt = [first, *PROMPT[1:]]
    request = Request(name, prompt, SamplingParams(max_tokens=max_tokens), lora_id=lora_id)
    scheduler.add([request])
    return request


def test_slots_are_loaded_with_the_first_step_of_an_adapter() -> None:
    scheduler = make(2)
    first, base, other = (add(scheduler, n, i) for n, i in (("a", 7), ("b", 0), ("c", 9)))
    plan = step(scheduler)
    assert plan.lora_loads == [LoraLoad(0, 7), LoraLoad(1, 9)]
    assert [seq.lora_slot for seq in plan.new_seqs] == [0, -1, 1]
    assert (first.lora_slot, base.lora_slot, other.lora_slot) == (0, -1, 1)
    again = add(scheduler, "d", 7)
    plan = step(scheduler)
    assert plan.lora_loads == [] and again.lora_slot == 0


def test_a_third_adapter_waits_for_a_slot_and_others_pass_it() -> None:
    scheduler = make(2)
    add(scheduler, "a", 1, 3)
    add(scheduler, "b", 2, 30)
    waiting = add(scheduler, "c", 3)
    base, same = add(scheduler, "d", 0), add(scheduler, "e", 2, first=1)
    step(scheduler)
    assert waiting.status is RequestStatus.WAITING
    assert base.status is same.status is RequestStatus.RUNNING
    step(scheduler)
    step(scheduler)  # "a" ends here
    plan = step(scheduler)
    assert waiting.status is RequestStatus.RUNNING
    assert plan.lora_loads == [LoraLoad(0, 3)]  # the slot of the ended adapter


def test_the_least_recently_used_adapter_leaves_its_slot() -> None:
    scheduler = make(2)
    for number, lora_id in enumerate((1, 2, 1, 3, 1)):
        request = add(scheduler, str(number), lora_id, 1)
        loads = step(scheduler).lora_loads
        assert request.finished
        assert [load.lora_id for load in loads] == ([] if number in (2, 4) else [lora_id])


def test_an_adapter_is_not_passed_for_ever() -> None:
    scheduler = make(1, max_num_seqs=2)
    add(scheduler, "first", 1, 3)
    step(scheduler)
    waiting = add(scheduler, "waiting", 2, 1)
    started = 0
    for number in range(4 * MAX_PASSES):
        add(scheduler, f"more-{number}", 1, 2)
        step(scheduler)
        started += 1
        if waiting.finished:
            break
    assert waiting.finished
    assert started <= 2 * MAX_PASSES + 8


def test_loads_of_a_failed_step_are_planned_again() -> None:
    scheduler = make(2)
    add(scheduler, "a", 1)
    plan = scheduler.schedule()
    assert plan.lora_loads == [LoraLoad(0, 1)]
    scheduler.fail_step(plan.step_id, "x")
    assert scheduler.queues.loras.num_used == 0  # nothing runs with it any more
    again = add(scheduler, "b", 1)
    assert step(scheduler).lora_loads == [LoraLoad(again.lora_slot, 1)]


def test_a_failed_step_reloads_for_requests_that_were_not_in_it() -> None:
    scheduler = make(2)
    add(scheduler, "a", 1)
    plan = scheduler.schedule()
    other = add(scheduler, "b", 1, first=1)
    second = scheduler.schedule()  # "b" starts behind the step in flight
    assert second.lora_loads == [] and other.lora_slot == 0
    scheduler.fail_step(plan.step_id, "x")
    scheduler.update_from_output(answer(second))
    assert step(scheduler).lora_loads == [LoraLoad(0, 1)]


def test_preempted_requests_release_their_slot() -> None:
    scheduler = make(1)
    request = add(scheduler, "a", 1, 50)
    step(scheduler)
    preempt_latest(scheduler)
    assert request.lora_slot == -1
    other = add(scheduler, "b", 2, 1)
    step(scheduler)  # "a" is first in line and has its slot again
    assert request.status is RequestStatus.RUNNING and other.status is RequestStatus.WAITING


def test_drop_frees_the_slot_and_refuses_running_adapters() -> None:
    scheduler = make(1)
    request = add(scheduler, "a", 1, 2)
    step(scheduler)
    slots = scheduler.queues.loras
    with pytest.raises(RuntimeError):
        slots.drop(1)
    slots._running[1] = 1
    step(scheduler)
    assert request.finished
    slots.drop(1)
    assert slots.num_used == 0
    slots.drop(1)  # unknown now


def test_prefixes_are_not_shared_between_adapters_and_loads() -> None:
    scheduler = make(4)
    cached = []
    for number, lora_id in enumerate((0, 1, 2, 1, 0, 3)):
        request = add(scheduler, str(number), lora_id, 1)
        step(scheduler)
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 0, 8, 8, 0]


def test_a_salt_cannot_name_an_adapter() -> None:
    scheduler = make(4)
    add(scheduler, "a", 1, 1)
    step(scheduler)
    for salt in ("1", "(1, '')", "1\0"):
        request = Request(salt, list(PROMPT), SamplingParams(max_tokens=1), cache_salt=salt)
        scheduler.add([request])
        step(scheduler)
        assert request.num_cached_tokens == 0
