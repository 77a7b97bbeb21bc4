"""The worker of one rank: owns the model, builds the arrays of a step, runs it and samples.

A step has five stages:

    prepare_step_inputs       plan -> ModelStepInput (tokens, positions, logits mask)
    build_attention_metadata  -> AttentionMetadata (slots, block tables, context lengths)
    run_model_forward         adapter.forward
    sample                    adapter.sample, until a draft token is rejected; into the input batch
    postprocess               sampled tokens -> StepOutput

A step is sampled on the host when it is collected (`Sampler`), or by the device (`QueuedSteps`).
The worker schedules nothing; its state follows from the plans.

In a pipeline, the last stage computes a step when it is collected, because it samples from its own
logits; the other stages compute it at once and get the sampled tokens by `store_tokens`.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llaisys.common.errors import ClosedError, InvalidInputError
from llaisys.common.numa import bind_to_cores, format_cpus
from llaisys.common.step import AttentionMetadata, ForwardOutput, ModelStepInput, TokenMasks
from llaisys.common.types import (
    BlockCopy,
    DraftRequest,
    GpuUsage,
    ModelInfo,
    SchedulerOutputs,
    StepOutput,
)
from llaisys.engine.config import EngineConfig
from llaisys.engine.worker.batch_updater import BatchUpdater, swap_blocks
from llaisys.engine.worker.drafting import Drafter, load_drafter
from llaisys.engine.worker.in_flight import InFlightStep, InFlightSteps
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.engine.worker.lora_store import LORA_METHODS, LoraStore, load_loras
from llaisys.engine.worker.model_opening import OpenedModel, describe, device_ids, open_model
from llaisys.engine.worker.prompt_outputs import prompt_logprobs, read_pooled
from llaisys.engine.worker.queued_steps import QueuedSteps
from llaisys.engine.worker.sampler import Sampler, output_rows
from llaisys.engine.worker.sampling_state import SamplingState
from llaisys.engine.worker.step_buffers import (
    PreparedStep,
    SampledTokens,
    SamplingBatch,
    StepBuffers,
)
from llaisys.engine.worker.timers import StageTimers
from llaisys.engine.worker.warmup import warm_up
from llaisys.models.base import ModelAdapter
from llaisys.models.device import GpuMonitor, is_gpu, open_device, warn_if_cublaslt_missing

logger = logging.getLogger("llaisys.engine")


class Worker:
    """Created by an executor: `init_device`, `open_model`, `load_model`, `warmup`, then steps."""

    def __init__(
        self,
        config: EngineConfig,
        local_rank: int = 0,
        rank: int = 0,
        distributed_init_method: str = "",
        is_driver_worker: bool = True,
    ) -> None:
        self.config = config
        self.local_rank = local_rank
        self.rank = rank
        self.distributed_init_method = distributed_init_method
        self.is_driver_worker = is_driver_worker
        self.device_id = 0
        self.adapter: ModelAdapter | None = None
        self.info: ModelInfo | None = None
        self._opened: OpenedModel | None = None  # between `open_model` and `load_model`
        self._batch: InputBatch
        self._sampling: SamplingState
        self._buffers: StepBuffers
        self._updater: BatchUpdater
        self._sampler: Sampler
        self._drafter: Drafter | None = None  # of the driver rank
        self._loras: LoraStore | None = None  # None: adapters are off
        self._in_flight: InFlightSteps
        self._queued_steps: QueuedSteps
        self._planned: deque[SchedulerOutputs] = deque()  # of the last stage: not computed yet
        parallel = replace(config.parallel, rank=rank)
        self._has_stages = parallel.pipeline_parallel_size > 1
        self._is_last_stage = parallel.is_last_stage
        self._spare_buffers: StepBuffers  # a step in flight uses the others
        self._host_file = -1  # memfd of the host slots, for other engines; -1: not shared
        self._gpu_monitor: GpuMonitor | None = None
        self._timers = StageTimers()
        self._warmup_samples: dict[str, int] = {}  # rows by sampler

    # ---- life cycle ----------------------------------------------------------------------------

    def init_device(self) -> None:
        """Bind this rank to its device; with `numa`, this thread to cores of a NUMA node."""
        self.device_id = device_ids(self.config)[self.local_rank]
        parallel = self.config.parallel
        if parallel.numa and parallel.world_size > 1:
            bind_to_cores(self.local_rank, parallel.world_size)
        open_device(self.config.device)
        warn_if_cublaslt_missing(self.config.device)

    def open_model(self) -> int:
        """Open the model's files and return the number of KV blocks that this rank has memory for.
        Nothing large is allocated before `load_model`, which gets the minimum over all ranks."""
        self._opened = opened = open_model(
            self.config, self.rank, self.local_rank, self.distributed_init_method
        )
        return opened.affordable_blocks

    def load_model(self, num_blocks: int | None = None) -> ModelInfo:
        """Load the weights and allocate the KV cache. `num_blocks`: the minimum over all ranks;
        None: there is one rank."""
        if self._opened is None:
            self.open_model()
        assert self._opened is not None
        opened, self._opened = self._opened, None
        checkpoint, block_size = opened.checkpoint, self.config.cache.block_size
        capacity = (num_blocks or opened.affordable_blocks) * block_size
        options = replace(opened.options, kv_cache_capacity_tokens=capacity)
        self.adapter = adapter = opened.adapter_class.load(checkpoint, options)
        if opened.num_host_blocks:
            if self.config.cache.kv_transfer != "off":
                self._host_file = os.memfd_create("llaisys-kv", os.MFD_CLOEXEC)
            adapter.reserve_host_blocks(opened.num_host_blocks, self._host_file)
        self.info = describe(opened, adapter, self.config)
        if opened.loras is not None:
            adapter.reserve_loras(opened.loras.num_slots, opened.loras.max_rank)
            self._loras = load_loras(opened.loras, self.config.lora, checkpoint, options.parallel)
        self._make_buffers(adapter, self.info)
        speculative = self.config.speculative
        if opened.draft is not None and speculative is not None:
            self._drafter = load_drafter(
                opened.draft,
                adapter,
                self.info.num_blocks,
                self.config.scheduler.token_budget,
                speculative.disable_by_batch_size,
            )
            self._timers.add("draft")
        logger.info(
            "worker pid=%d rank=%d local_rank=%d device=%s:%d tp_size=%d pp_size=%d threads=%d "
            "cpus=%s",
            os.getpid(),
            self.rank,
            self.local_rank,
            self.config.device,
            self.device_id,
            self.config.parallel.tensor_parallel_size,
            self.config.parallel.pipeline_parallel_size,
            options.n_threads,
            format_cpus(os.sched_getaffinity(0)),
        )
        return self.info

    def _make_buffers(self, adapter: ModelAdapter, info: ModelInfo) -> None:
        scheduler = self.config.scheduler
        length = min(info.max_model_len, info.num_blocks * info.block_size + 1)
        self._batch = InputBatch(scheduler.max_num_seqs, length, info.block_size)
        self._buffers = StepBuffers(self._batch, scheduler.token_budget)
        self._spare_buffers = StepBuffers(self._batch, scheduler.token_budget)
        self._in_flight = InFlightSteps(self._batch)
        self._sampling = SamplingState(scheduler.max_num_seqs, info.vocab_size)
        self._updater = BatchUpdater(
            self._batch, self._sampling, self._loras, samples=self._is_last_stage
        )
        self._sampler = Sampler(adapter, self._batch, self._sampling, self._timers.native)
        self._queued_steps = QueuedSteps(adapter, self._in_flight, self._sampler, self._timers)

    def warmup(self) -> None:
        """Run one token; on a GPU capture the decode steps. No request may own a block."""
        assert self.info is not None
        adapter = self._open_adapter()
        warm_up(adapter, self.config, self.info, self.gpu_usage, samples=self._is_last_stage)
        adapter.profile(reset=True)
        self._warmup_samples = adapter.sample_counts()

    def gpu_usage(self) -> GpuUsage | None:
        """Return memory and load of this rank's GPU; None on a CPU."""
        if not is_gpu(self.config.device):
            return None
        if self._gpu_monitor is None:
            self._gpu_monitor = GpuMonitor(self.config.device, self.device_id)
        return self._gpu_monitor.read()

    def debug_state(self) -> dict[str, int]:
        """Counts of what sequences hold."""
        return {
            "sequences": len(self._batch.row_of),
            "sampling_rules": self._sampling.num_rules,
            "steps_in_flight": len(self._in_flight),
            "loras": 0 if self._loras is None else len(self._loras),
        }

    @property
    def batch(self) -> InputBatch:
        """The sequences that the scheduler has not released."""
        return self._batch

    @property
    def drafter(self) -> Drafter | None:
        """The draft model or head; None: drafts come from the scheduler, or there are none."""
        return self._drafter

    def check_health(self) -> None:
        """Raises when the worker cannot run a step."""
        self._open_adapter()

    def close(self) -> None:
        parts = (self._opened, self.adapter, self._drafter, self._loras)
        self._opened = self.adapter = self._drafter = self._loras = None
        for part in parts:
            if part is not None:
                part.close()
        if self._host_file >= 0:
            os.close(self._host_file)
            self._host_file = -1

    def _open_adapter(self) -> ModelAdapter:
        if self.adapter is None:
            raise ClosedError(f"worker rank {self.rank}: no model is loaded")
        return self.adapter

    # ---- drafts --------------------------------------------------------------------------------

    def draft(self, requests: Sequence[DraftRequest], released: Sequence[int]) -> list[list[int]]:
        """Return draft tokens of the draft model or head; see Drafter."""
        if self._drafter is None:
            raise ClosedError(f"worker rank {self.rank}: no draft model is loaded")
        with self._timers["draft"]:
            return self._drafter.draft(requests, released)

    # ---- KV transfer ---------------------------------------------------------------------------

    def host_file(self) -> int:
        if self._host_file < 0:
            raise ClosedError(f"worker rank {self.rank}: no host slots are shared")
        return self._host_file

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        swap_blocks(self._open_adapter(), copies)

    def call_lora(self, method: str, lora_id: int, *args: Any) -> Any:
        """Call one of LORA_METHODS of the LoraStore."""
        if self._loras is None:
            raise ClosedError(f"worker rank {self.rank}: LoRA adapters are off")
        if method not in LORA_METHODS:
            raise ValueError(f"{method!r} is not a method of a LoraStore")
        return getattr(self._loras, method)(lora_id, *args)

    # ---- steps ---------------------------------------------------------------------------------

    def execute_model(self, plan: SchedulerOutputs, queued: bool = False) -> None:
        """Launch a step; `sample_tokens` collects it. A device may still compute on return. A step
        that raises leaves only the rows of its new sequences, which the scheduler releases.

        `queued`: the device also samples, so that the next step can be launched before this one is
        collected. Needs `can_launch` and a plan without drafts that does not need sync; at most one
        other step may be in flight. In a pipeline, steps in flight have different sequences that
        sample, and `queued` has no effect."""
        if self._has_stages and self._is_last_stage:
            self._planned.append(plan)
        else:
            self._launch(plan, queued and not self._has_stages)
        self._timers.num_steps += 1

    def sample_tokens(
        self, step_id: int | None = None, masks: Callable[[], TokenMasks] | None = None
    ) -> StepOutput:
        """Wait for a launched step, sample it unless the device has, and return its output.
        `step_id`: earlier steps are discarded; None: the oldest one. `masks`: returns the masks of
        structured output; called after the forward pass."""
        self._run_planned(step_id)
        launched = self._in_flight.take(step_id)
        if launched.forward is None:
            return self._queued_steps.collect(launched)
        found = None if masks is None else masks()
        with self._timers["sample"]:
            sampled = self.sample(launched.forward, launched.step.sampling, found)
        with self._timers["postprocess"]:
            output = self.postprocess(launched, sampled)
        if self._drafter is not None:
            with self._timers["draft"]:
                self._drafter.observe(launched.plan, output, self._batch, self._open_adapter())
        return output

    @property
    def can_launch(self) -> bool:
        return self._open_adapter().can_launch and not self._has_stages

    @property
    def num_planned(self) -> int:
        """Steps that the last stage of a pipeline has not computed; others may wait for it."""
        return len(self._planned)

    def _run_planned(self, step_id: int | None) -> None:
        """Compute the planned steps up to this one, or the oldest one."""
        while self._planned:
            plan = self._planned.popleft()
            self._launch(plan, queued=False)
            if step_id in (None, plan.step_id):
                return

    def _launch(self, plan: SchedulerOutputs, queued: bool) -> None:
        """Apply a plan and launch its step. In a pipeline, a stage that rejects it leaves the
        others out of step."""
        if queued:
            self._buffers, self._spare_buffers = self._spare_buffers, self._buffers
            if self._drafter is not None:
                self._drafter.skip(plan)
        try:
            with self._timers["prepare_step_inputs"]:
                step = self.prepare_step_inputs(plan)
            with self._timers["build_attention_metadata"]:
                attention = self.build_attention_metadata(step)
            if queued:
                self._queued_steps.launch(plan, step, attention, self._buffers)
                return
            with self._timers["run_model_forward"]:
                forward = self.run_model_forward(step, attention)
            self._in_flight.add(InFlightStep(plan, step, forward))
        except InvalidInputError as error:
            if not self._has_stages:
                raise
            raise RuntimeError(f"the stage rejected step {plan.step_id}: {error}") from error

    def store_tokens(self, step_id: int, sampled: Mapping[int, Sequence[int]]) -> None:
        """Store the tokens that the last stage has sampled, by sequence."""
        launched = self._in_flight.take(step_id)
        # A sequence without a token has failed, or computes its last token again.
        tokens = [next(iter(sampled.get(seq_id, ())), 0) for seq_id in launched.seq_ids]
        self._in_flight.store_tokens(launched, np.array(tokens, np.int64))

    def prepare_step_inputs(self, plan: SchedulerOutputs) -> PreparedStep:
        self._updater.update(self._open_adapter(), plan)
        step = self._buffers.fill_tokens(plan)
        self._updater.mark_prompts(plan, step)
        return step

    def build_attention_metadata(self, step: PreparedStep) -> AttentionMetadata:
        return self._buffers.fill_attention(step)

    def run_model_forward(
        self, step: ModelStepInput, attention: AttentionMetadata
    ) -> ForwardOutput:
        with self._timers.native:
            return self._open_adapter().forward(step, attention)

    def sample(
        self, forward: ForwardOutput, batch: SamplingBatch, masks: TokenMasks | None = None
    ) -> SampledTokens:
        """Sample a token per sequence and one after each accepted draft token; see Sampler."""
        return self._sampler.sample(forward, batch, masks)

    def postprocess(self, launched: InFlightStep, sampled: SampledTokens) -> StepOutput:
        """Build the step output."""
        adapter, step, forward = self._open_adapter(), launched.step, launched.forward
        assert forward is not None
        output = sampled.output(launched.plan.step_id)
        for prompt in step.prompt_logprobs:
            rows = output_rows(forward, prompt.tokens)
            output.prompt_logprobs[prompt.seq_id] = prompt_logprobs(adapter, rows, prompt)
        output.pooled = read_pooled(adapter, step.pooled)
        return output

    # ---- profile -------------------------------------------------------------------------------

    def profile(self, reset: bool = False) -> dict[str, Any]:
        """Return StageTimers.report with the rank and the rows sampled per device, without the
        warm-up."""
        native, counts = {}, {}
        if self.adapter is not None:
            native, counts = self.adapter.profile(reset), self.adapter.sample_counts()
        counts = {where: n - self._warmup_samples.get(where, 0) for where, n in counts.items()}
        return {"rank": self.rank, "sample_counts": counts, **self._timers.report(native, reset)}
