"""One rank's share of the work: owns the model, turns a plan into arrays, draws the tokens.

A step is five stages, in this order:

    prepare_step_inputs       plan -> ModelStepInput (tokens, positions, who wants logits)
    build_attention_metadata  -> AttentionMetadata (slots, block tables, context lengths)
    run_model_forward         adapter.forward
    sample                    adapter.sample
    postprocess               drawn ids -> StepOutput, and into the rows for the next step

Between steps the worker keeps only what the plans told it. It decides nothing about who runs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llaisys.common.errors import ClosedError, InvalidInputError
from llaisys.common.numa import bind_to_cores, format_cpus
from llaisys.common.step import AttentionMetadata, ForwardOutput, ModelStepInput, TokenMasks
from llaisys.common.types import DraftRequest, GpuUsage, ModelInfo, SchedulerOutputs, StepOutput
from llaisys.engine.config import EngineConfig
from llaisys.engine.worker.batch_updater import BatchUpdater
from llaisys.engine.worker.drafting import Drafter, load_drafter
from llaisys.engine.worker.in_flight import InFlightStep, InFlightSteps
from llaisys.engine.worker.input_batch import InputBatch
from llaisys.engine.worker.model_opening import OpenedModel, describe, device_ids, open_model
from llaisys.engine.worker.pooling import read_vectors
from llaisys.engine.worker.sampler import Sampler, output_rows
from llaisys.engine.worker.sampling_batch import SampledTokens, SamplingBatch
from llaisys.engine.worker.sampling_state import SamplingState
from llaisys.engine.worker.scoring import score_prompt
from llaisys.engine.worker.step_buffers import PreparedStep, StepBuffers
from llaisys.engine.worker.timers import StageTimers
from llaisys.engine.worker.verification_buffers import VerificationBuffers
from llaisys.engine.worker.warmup import draft_runs, full_step, graph_rows, record_steps
from llaisys.models.base import ModelAdapter
from llaisys.models.device import GpuMonitor, is_gpu, open_device, warn_if_cublaslt_missing

logger = logging.getLogger("llaisys.engine")


class Worker:
    """Built by an executor: construct, `init_device`, `open_model`, `load_model`, `warmup`, then
    steps."""

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
        self._rows: InputBatch
        self._buffers: StepBuffers
        self._few: VerificationBuffers
        self._sampling: SamplingState
        self._held: BatchUpdater
        self._drawer: Sampler
        self._drafter: Drafter | None = None  # the driver rank's, if any
        self._launched: InFlightSteps
        self._spare_buffers: StepBuffers  # those of the step that was launched last are in use
        self._begun: tuple[SchedulerOutputs, PreparedStep, ForwardOutput] | None = None
        self._gpu_monitor: GpuMonitor | None = None
        self._timers = StageTimers()

    # ---- life ----------------------------------------------------------------------------------

    def init_device(self) -> None:
        """Bind this rank to its device; with `numa`, this thread to cores of a NUMA node."""
        self.device_id = device_ids(self.config)[self.local_rank]
        parallel = self.config.parallel
        if parallel.numa and parallel.tensor_parallel_size > 1:
            bind_to_cores(self.local_rank, parallel.tensor_parallel_size)
        open_device(self.config.device)
        warn_if_cublaslt_missing(self.config.device)

    def open_model(self) -> int:
        """Open the model's files and say how many KV blocks this rank can afford. Nothing large is
        allocated before all ranks have agreed on a number; see `load_model`."""
        self._opened = opened = open_model(
            self.config, self.rank, self.local_rank, self.distributed_init_method
        )
        return opened.affordable_blocks

    def load_model(self, num_blocks: int | None = None) -> ModelInfo:
        """Load the weights and allocate the KV cache; says what it is and how many blocks it got.

        `num_blocks`: what the ranks have agreed on; None: there is no other rank.
        """
        if self._opened is None:
            self.open_model()
        assert self._opened is not None
        opened, self._opened = self._opened, None
        checkpoint, block_size = opened.checkpoint, self.config.cache.block_size
        capacity = (num_blocks or opened.affordable_blocks) * block_size
        options = replace(opened.options, kv_cache_capacity_tokens=capacity)
        self.adapter = adapter = opened.adapter_class.load(checkpoint, options)
        if opened.num_host_blocks:
            adapter.reserve_host_blocks(opened.num_host_blocks)
        self.info = describe(opened, adapter, self.config)
        self._make_buffers(adapter, self.info)
        speculative = self.config.speculative
        if opened.draft is not None and speculative is not None:
            self._drafter = load_drafter(
                opened.draft,
                adapter,
                self.info.num_blocks,
                self.config.scheduler.max_num_batched_tokens,
                speculative.disable_by_batch_size,
            )
        logger.info(
            "worker pid=%d rank=%d local_rank=%d device=%s:%d tp_size=%d threads=%d cpus=%s",
            os.getpid(),
            self.rank,
            self.local_rank,
            self.config.device,
            self.device_id,
            self.config.parallel.tensor_parallel_size,
            options.n_threads,
            format_cpus(os.sched_getaffinity(0)),
        )
        return self.info

    def _make_buffers(self, adapter: ModelAdapter, info: ModelInfo) -> None:
        scheduler = self.config.scheduler
        length = min(info.max_model_len, info.num_blocks * info.block_size + 1)
        self._rows = InputBatch(scheduler.max_num_seqs, length, info.block_size)
        self._buffers = StepBuffers(self._rows, scheduler.max_num_batched_tokens)
        self._spare_buffers = StepBuffers(self._rows, scheduler.max_num_batched_tokens)
        self._few = VerificationBuffers(self._rows)
        self._launched = InFlightSteps(self._rows)
        self._sampling = SamplingState(scheduler.max_num_seqs, info.vocab_size)
        self._held = BatchUpdater(self._rows, self._sampling)
        self._drawer = Sampler(adapter, self._rows, self._sampling, self._timers.native)

    def warmup(self) -> None:
        """A token through the model; on a GPU every step that it records. Nobody holds a block."""
        assert self.info is not None
        rows = graph_rows(min(self.config.scheduler.max_num_seqs, self.info.num_blocks))
        runs, full = draft_runs(self.config, self.info), full_step(self.config, self.info)
        record_steps(self._open_adapter(), rows, runs, full, self.info.block_size, self.gpu_usage)

    def gpu_usage(self) -> GpuUsage | None:
        """Of the GPU that this rank computes on; None: it has none."""
        if not is_gpu(self.config.device):
            return None
        if self._gpu_monitor is None:
            self._gpu_monitor = GpuMonitor(self.config.device, self.device_id)
        return self._gpu_monitor.read()

    def check_health(self) -> None:
        """Raises when the worker cannot run a step."""
        self._open_adapter()

    def close(self) -> None:
        adapter, self.adapter = self.adapter, None
        opened, self._opened = self._opened, None
        drafter, self._drafter = self._drafter, None
        self._begun = None
        for part in (opened, adapter, drafter):
            if part is not None:
                part.close()

    def _open_adapter(self) -> ModelAdapter:
        if self.adapter is None:
            raise ClosedError(f"worker rank {self.rank}: no model is loaded")
        return self.adapter

    # ---- drafts --------------------------------------------------------------------------------

    def draft(self, requests: Sequence[DraftRequest], forgotten: Sequence[int]) -> list[list[int]]:
        """What the draft model or head says to each; see Drafter."""
        if self._drafter is None:
            raise ClosedError(f"worker rank {self.rank}: no draft model is loaded")
        return self._drafter.draft(requests, forgotten)

    # ---- a step --------------------------------------------------------------------------------

    def execute_step(
        self, plan: SchedulerOutputs, masks: Callable[[], TokenMasks] | None = None
    ) -> StepOutput:
        """All five stages. A step that raises leaves no trace but the rows of its new sequences,
        which the scheduler releases. `masks`: called after the forward pass, when some answers of
        the step must have a form."""
        computed = self._compute_step(plan)
        return self._draw_step(plan, *computed, None if masks is None else masks())

    def execute_model(self, plan: SchedulerOutputs) -> None:
        """The first three stages; a device may still be at it. `sample_tokens` must follow."""
        self._begun = None
        self._begun = (plan, *self._compute_step(plan))

    def sample_tokens(self) -> StepOutput:
        """The last two stages of the step that `execute_model` began."""
        if self._begun is None:
            raise RuntimeError("sample_tokens without execute_model")
        begun, self._begun = self._begun, None
        return self._draw_step(*begun)

    @property
    def can_launch(self) -> bool:
        return self._open_adapter().can_launch

    def launch_step(self, plan: SchedulerOutputs) -> None:
        """Hand a step to the model and return while it runs; at most one other may be out. Only for
        plans of which nothing but the tokens themselves depends on those of the step that is out:
        no drafts, shifts, forms or scored prompts. Fails as `execute_step` does."""
        self._buffers, self._spare_buffers = self._spare_buffers, self._buffers
        self._sampling.set_masks(None, self._rows.row_of)
        with self._timers["prepare_step_inputs"]:
            step = self.prepare_step_inputs(plan)
        self._launched.add(self._launch(plan, step))
        if self._drafter is not None:
            self._drafter.pass_over(plan)
        self._timers.num_steps += 1

    def _launch(self, plan: SchedulerOutputs, step: PreparedStep) -> InFlightStep:
        with self._timers["build_attention_metadata"]:
            attention = self.build_attention_metadata(step)
        drawing = step.drawing
        with self._timers["sample"]:
            sampling = self._drawer.metadata(drawing, np.arange(len(drawing.rows)))
        return InFlightStep(
            plan=plan,
            step=step,
            ticket=self._open_adapter().launch(step, attention, sampling),
            seq_ids=self._drawer.seq_ids(drawing),
            tenures=self._rows.tenures[drawing.rows],
            num_released=self._rows.num_released,
            with_logprobs=self._sampling.logprobs_wanted(drawing.rows),
            arrays=(attention, sampling),
        )

    def finish_step(self, step_id: int) -> StepOutput:
        """Wait for a launched step and say what it drew; those launched before it are forgotten."""
        launched = self._launched.take(step_id)
        if not launched.plan.batch_size:  # nobody was left when it was launched again
            return StepOutput(step_id, {})
        adapter = self._open_adapter()
        try:
            with self._timers["run_model_forward"], self._timers.native:
                tokens = adapter.collect(launched.ticket)
        except Exception as error:
            return self._recover(launched, error)
        except BaseException:
            adapter.last_output()  # when it comes, no step reads its arrays any more
            raise
        if tokens is None:
            raise RuntimeError(f"step {step_id} was not run")
        with self._timers["postprocess"]:
            self._launched.settle(launched, tokens)
            return launched.output(tokens.tolist(), adapter)

    def _recover(self, launched: InFlightStep, error: Exception) -> StepOutput:
        """A step failed, so that the one behind it was not run. When it was the fault of one
        sequence, the others draw; otherwise all of them are lost. Then the one behind it is
        launched again, as far as it can be."""
        self._launched.settle(launched, 0)  # any token will do where there will be none
        forward = self._open_adapter().last_output()
        lost = frozenset(launched.plan.seq_ids)
        try:
            if not isinstance(error, InvalidInputError) or not forward.n_outputs:
                raise error
            output = self._draw_again(launched, forward)
            lost = frozenset()
            return output
        finally:
            behind = self._launched.pop()
            if behind is not None:
                self._open_adapter().collect(behind.ticket)
                plan = behind.without(lost)
                if plan.batch_size:
                    self._launched.add(self._launch(plan, self._buffers.fill_tokens(plan)))
                else:
                    self._launched.add(replace(behind, plan=plan))

    def _draw_again(self, launched: InFlightStep, forward: ForwardOutput) -> StepOutput:
        """The sequences that have left meanwhile get nothing."""
        step, held = launched.step, self._launched.held(launched)
        step = replace(step, drawing=step.drawing.only(held))
        output = self._draw_step(launched.plan, step, forward)
        for seq_id, is_held in zip(launched.seq_ids, held.tolist(), strict=True):
            if not is_held:
                output.sampled[seq_id] = []
        return output

    def _compute_step(self, plan: SchedulerOutputs) -> tuple[PreparedStep, ForwardOutput]:
        if VerificationBuffers.holds(plan):
            return self._compute_few(plan)
        with self._timers["prepare_step_inputs"]:
            step = self.prepare_step_inputs(plan)
        with self._timers["build_attention_metadata"]:
            attention = self.build_attention_metadata(step)
        with self._timers["run_model_forward"]:
            forward = self.run_model_forward(step, attention)
        self._timers.num_steps += 1
        return step, forward

    def _compute_few(self, plan: SchedulerOutputs) -> tuple[PreparedStep, ForwardOutput]:
        with self._timers["prepare_step_inputs"]:
            self._held.follow(self._open_adapter(), plan)
            step, attention = self._few.fill(plan)
        with self._timers["run_model_forward"]:
            forward = self.run_model_forward(step, attention)
        self._timers.num_steps += 1
        return self._few.prepared(plan, step), forward

    def _draw_step(
        self,
        plan: SchedulerOutputs,
        step: PreparedStep,
        forward: ForwardOutput,
        masks: TokenMasks | None = None,
    ) -> StepOutput:
        drawing, left_out = step.drawing, StepOutput(plan.step_id, {})
        if masks is not None and (masks.late or masks.failed):
            drawing, left_out = self._drawer.leave_out(drawing, masks, left_out)
        self._sampling.set_masks(masks, self._rows.row_of)
        scores = {}
        with self._timers["sample"]:
            for prompt in step.scored:
                rows = output_rows(forward, prompt.tokens)
                scores[prompt.seq_id] = score_prompt(self._open_adapter(), rows, prompt)
            output = self._drawer.sample_with_drafts(plan, forward, drawing)
        if output is None:
            output = self._draw_in_turn(plan, forward, drawing)
        output.prompt_logprobs = scores
        output.pooled = read_vectors(self._open_adapter(), step.pooled)
        output.sampled.update(left_out.sampled)
        output.failed.update(left_out.failed)
        if self._drafter is not None:
            self._drafter.observe(plan, output, self._rows, self._open_adapter())
        return output

    def _draw_in_turn(
        self, plan: SchedulerOutputs, forward: ForwardOutput, drawing: SamplingBatch
    ) -> StepOutput:
        """A token for each sequence, then one for each whose draft it was, and so on."""
        with self._timers["sample"]:
            drawn = self.sample(forward, drawing)
        with self._timers["postprocess"]:
            agreed = self._drawer.agreed(drawn)
            output = self.postprocess(plan, drawn)
        while agreed is not None and agreed.any():
            following = drawn.drawing.following(agreed)
            self._sampling.advance_masks(following.rows)
            with self._timers["sample"]:
                drawn = self.sample(forward, following)
            with self._timers["postprocess"]:
                agreed = self._drawer.agreed(drawn)
                output.extend(self.postprocess(plan, drawn))
        return output

    def prepare_step_inputs(self, plan: SchedulerOutputs) -> PreparedStep:
        self._held.follow(self._open_adapter(), plan)
        step = self._buffers.fill_tokens(plan)
        self._held.mark_prompts(plan, step)
        return step

    def build_attention_metadata(self, step: PreparedStep) -> AttentionMetadata:
        return self._buffers.fill_attention(step)

    def run_model_forward(
        self, step: ModelStepInput, attention: AttentionMetadata
    ) -> ForwardOutput:
        with self._timers.native:
            return self._open_adapter().forward(step, attention)

    def sample(self, forward: ForwardOutput, drawing: SamplingBatch) -> SampledTokens:
        """Draw a token for each sequence of the step that wants one, in the plan's order."""
        return self._drawer.sample(forward, drawing)

    def postprocess(self, plan: SchedulerOutputs, drawn: SampledTokens) -> StepOutput:
        """Remember the drawn tokens for the next step and say whose they are."""
        return self._drawer.postprocess(plan, drawn)

    # ---- measuring -----------------------------------------------------------------------------

    def profile(self, reset: bool = False) -> dict[str, Any]:
        """As StageTimers reports it, with the rank whose it is and where rows were drawn."""
        native = {} if self.adapter is None else self.adapter.profile(reset)
        draws = {} if self.adapter is None else self.adapter.sample_counts()
        return {"rank": self.rank, "draws": draws, **self._timers.report(native, reset)}
