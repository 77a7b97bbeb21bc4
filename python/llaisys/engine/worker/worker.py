"""One rank's share of the work: owns the model, turns a plan into arrays, draws the tokens.

A step is five stages, in this order:

    prepare_step_inputs       plan -> ModelStepInput (tokens, positions, who wants logits)
    build_attention_metadata  -> AttentionMetadata (slots, block tables, context lengths)
    run_model_forward         adapter.forward
    sample                    adapter.sample
    postprocess               drawn ids -> StepOutput, and into the rows for the next step

Each stage takes what the one before it returned; between steps the worker keeps only what the plans
told it about each sequence. It decides nothing about who runs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.common.errors import ClosedError, InvalidInputError
from llaisys.common.numa import bind_to_share, format_cpus
from llaisys.common.step import (
    AttentionMetadata,
    ForwardOutput,
    ModelStepInput,
    RowLogprobs,
    SamplingMetadata,
    TokenMasks,
)
from llaisys.common.types import (
    ContextShift,
    DraftRequest,
    GpuUse,
    ModelInfo,
    SchedulerOutputs,
    StepOutput,
    TokenLogprobs,
)
from llaisys.engine.config import EngineConfig
from llaisys.engine.worker.batch import Drawing, Drawn, PreparedStep, SequenceRows, StepBuffers
from llaisys.engine.worker.drafting import Drafter, load_drafter
from llaisys.engine.worker.launching import LaunchedStep, LaunchedSteps
from llaisys.engine.worker.opening import OpenedModel, device_ids, open_model, usable_length
from llaisys.engine.worker.pooling import PromptPooling, read_vectors
from llaisys.engine.worker.sampling import SamplingRows
from llaisys.engine.worker.scoring import PromptScoring, score_prompt
from llaisys.engine.worker.warming import graph_rows, warm_up
from llaisys.models.base import ModelAdapter
from llaisys.models.device import GpuWatch, is_gpu, open_device

logger = logging.getLogger("llaisys.engine")

STAGES = (
    "prepare_step_inputs",
    "build_attention_metadata",
    "run_model_forward",
    "sample",
    "postprocess",
)


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
        self._rows: SequenceRows
        self._buffers: StepBuffers
        self._sampling: SamplingRows
        self._scoring: PromptScoring
        self._drafter: Drafter | None = None  # the driver rank's, if any
        self._pooling: PromptPooling
        self._launched: LaunchedSteps
        self._spare_buffers: StepBuffers  # those of the step that was launched last are in use
        self._begun: tuple[SchedulerOutputs, PreparedStep, ForwardOutput] | None = None
        self._gpu_watch: GpuWatch | None = None
        self._timers = {stage: Timer() for stage in STAGES}
        self._native_timer = Timer()
        self._steps = 0

    # ---- life ----------------------------------------------------------------------------------

    def init_device(self) -> None:
        """Bind this rank to its device; with `numa`, this thread to cores of a NUMA node."""
        self.device_id = device_ids(self.config)[self.local_rank]
        parallel = self.config.parallel
        if parallel.numa and parallel.tensor_parallel_size > 1:
            bind_to_share(self.local_rank, parallel.tensor_parallel_size)
        open_device(self.config.device)

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
        self.info = ModelInfo(
            model_path=opened.path,
            model_type=opened.model_type,
            vocab_size=adapter.vocab_size,
            max_model_len=usable_length(self.config, adapter.max_model_len),
            eos_token_ids=tuple(adapter.eos_token_ids),
            num_blocks=adapter.kv_capacity_tokens // block_size,
            block_size=block_size,
            kv_bytes_per_token=opened.kv_bytes_per_token,
            hidden_size=adapter.hidden_size,
            generation_defaults={} if checkpoint is None else {**checkpoint.config.generation},
            tokenizer_source=getattr(checkpoint, "tokenizer_source", None),
        )
        if self.info.num_blocks < 1:
            raise InvalidInputError(
                f"the KV cache holds {adapter.kv_capacity_tokens} tokens; one block needs "
                f"{block_size}: raise kv_cache_memory",
                field="kv_cache_memory",
                value=adapter.kv_capacity_tokens,
                limit=f"room for {block_size} tokens",
            )
        self._make_buffers(self.info)
        if opened.draft is not None:
            self._drafter = load_drafter(
                opened.draft,
                adapter,
                self.info.num_blocks,
                self.config.scheduler.max_num_batched_tokens,
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

    def _make_buffers(self, info: ModelInfo) -> None:
        scheduler = self.config.scheduler
        length = min(info.max_model_len, info.num_blocks * info.block_size + 1)
        self._rows = SequenceRows(scheduler.max_num_seqs, length, info.block_size)
        self._buffers = StepBuffers(self._rows, scheduler.max_num_batched_tokens)
        self._spare_buffers = StepBuffers(self._rows, scheduler.max_num_batched_tokens)
        self._launched = LaunchedSteps(self._rows)
        self._sampling = SamplingRows(scheduler.max_num_seqs, info.vocab_size)
        self._scoring = PromptScoring()
        self._pooling = PromptPooling()

    def warmup(self) -> None:
        """A token through the model; on a GPU every step that it records. Nobody holds a block."""
        assert self.info is not None
        adapter, before = self._open_adapter(), self.gpu_use()
        if before is None:
            warm_up(adapter, [1], self.info.block_size)
            return
        start = time.perf_counter()
        rows = graph_rows(min(self.config.scheduler.max_num_seqs, self.info.num_blocks))
        warm_up(adapter, rows, self.info.block_size)
        after = self.gpu_use() or before
        logger.info(
            "recorded %d decode steps of up to %d rows in %.1f s, %.1f MiB",
            len(rows),
            rows[0],
            time.perf_counter() - start,
            (after.memory_used - before.memory_used) / (1 << 20),
        )

    def gpu_use(self) -> GpuUse | None:
        """Of the GPU that this rank computes on; None: it has none."""
        if not is_gpu(self.config.device):
            return None
        if self._gpu_watch is None:
            self._gpu_watch = GpuWatch(self.config.device, self.device_id)
        return self._gpu_watch.look()

    def check_health(self) -> None:
        """Raises when the worker cannot run a step."""
        self._open_adapter()

    def close(self) -> None:
        adapter, self.adapter = self.adapter, None
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()
        self._begun = None
        drafter, self._drafter = self._drafter, None
        for model in (adapter, drafter):
            if model is not None:
                model.close()

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
        """The first three stages; `sample_tokens` must follow before the next step."""
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
        plans of which nothing depends on the tokens of the step that is out but the tokens
        themselves: no drafts, shifts, forms or scored prompts. Fails as `execute_step` does."""
        self._buffers, self._spare_buffers = self._spare_buffers, self._buffers
        self._sampling.set_masks(None, self._rows.row_of)
        with self._timers["prepare_step_inputs"]:
            step = self.prepare_step_inputs(plan)
        self._launched.add(self._launch(plan, step))
        self._steps += 1

    def _launch(self, plan: SchedulerOutputs, step: PreparedStep) -> LaunchedStep:
        with self._timers["build_attention_metadata"]:
            attention = self.build_attention_metadata(step)
        drawing = step.drawing
        with self._timers["sample"]:
            sampling = self._metadata(drawing, np.arange(len(drawing.rows)))
        return LaunchedStep(
            plan=plan,
            step=step,
            ticket=self._open_adapter().launch(step, attention, sampling),
            seq_ids=self._seq_ids(drawing),
            tenures=self._rows.tenures[drawing.rows],
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
            with self._timers["run_model_forward"], self._native_timer:
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
            drawn = tokens.tolist()
            sampled = {s: [t] for s, t in zip(launched.seq_ids, drawn, strict=True)}
            output = StepOutput(step_id, sampled)
            for index in launched.with_logprobs:
                found = adapter.collected_logprobs(index)
                if found is not None:
                    entry = token_logprobs(drawn[index], found)
                    output.logprobs[launched.seq_ids[index]] = [entry]
        return output

    def _recover(self, launched: LaunchedStep, error: Exception) -> StepOutput:
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

    def _draw_again(self, launched: LaunchedStep, forward: ForwardOutput) -> StepOutput:
        """The sequences that have left meanwhile get nothing."""
        step, held = launched.step, self._launched.held(launched)
        step = replace(step, drawing=step.drawing.only(held))
        output = self._draw_step(launched.plan, step, forward)
        for seq_id, is_held in zip(launched.seq_ids, held.tolist(), strict=True):
            if not is_held:
                output.sampled[seq_id] = []
        return output

    def _compute_step(self, plan: SchedulerOutputs) -> tuple[PreparedStep, ForwardOutput]:
        with self._timers["prepare_step_inputs"]:
            step = self.prepare_step_inputs(plan)
        with self._timers["build_attention_metadata"]:
            attention = self.build_attention_metadata(step)
        with self._timers["run_model_forward"]:
            forward = self.run_model_forward(step, attention)
        self._steps += 1
        return step, forward

    def _draw_step(
        self,
        plan: SchedulerOutputs,
        step: PreparedStep,
        forward: ForwardOutput,
        masks: TokenMasks | None = None,
    ) -> StepOutput:
        drawing, left_out = step.drawing, StepOutput(plan.step_id, {})
        if masks is not None and (masks.late or masks.failed):
            drawing, left_out = self._leave_out(drawing, masks, left_out)
        self._sampling.set_masks(masks, self._rows.row_of)
        scores = {}
        with self._timers["sample"]:
            for prompt in step.scored:
                rows = output_rows(forward, prompt.tokens)
                scores[prompt.seq_id] = score_prompt(self._open_adapter(), rows, prompt)
            drawn = self.sample(forward, drawing)
        with self._timers["postprocess"]:
            agreed = self._agreed(drawn)
            output = self.postprocess(plan, drawn)
            output.prompt_logprobs = scores
            output.pooled = read_vectors(self._open_adapter(), step.pooled)
        output.sampled.update(left_out.sampled)
        output.failed.update(left_out.failed)
        while agreed is not None and agreed.any():
            following = drawn.drawing.following(agreed)
            self._sampling.advance_masks(following.rows)
            with self._timers["sample"]:
                drawn = self.sample(forward, following)
            with self._timers["postprocess"]:
                agreed = self._agreed(drawn)
                output.extend(self.postprocess(plan, drawn))
        if self._drafter is not None:
            self._drafter.observe(plan, output, self._rows, self._open_adapter())
        return output

    def _leave_out(
        self, drawing: Drawing, masks: TokenMasks, output: StepOutput
    ) -> tuple[Drawing, StepOutput]:
        """Those whose masks are missing: no token when it is late, a failure when there is none."""
        kept = []
        for index, seq_id in enumerate(self._seq_ids(drawing)):
            if seq_id in masks.failed:
                output.failed[seq_id] = masks.failed[seq_id]
            elif seq_id in masks.late:
                output.sampled[seq_id] = []
            else:
                kept.append(index)
        return drawing.only(np.array(kept, dtype=np.int64)), output

    def _agreed(self, drawn: Drawn) -> NDArray[np.bool_] | None:
        """For which of the sequences the draft is what was drawn, so that the logits behind it are
        those of the drawn tokens; None when there are no drafts. Before `postprocess`."""
        rows, ends, _, drafts = drawn.drawing
        if drafts is None:
            return None
        agreed: NDArray[np.bool_] = (self._rows.tokens[rows, ends] == drawn.tokens) & (drafts > 0)
        return self._sampling.with_masks(rows, agreed)

    def prepare_step_inputs(self, plan: SchedulerOutputs) -> PreparedStep:
        adapter = self._open_adapter()
        for seq_id in plan.released_seq_ids:
            self._scoring.release(seq_id)
            self._pooling.release(adapter, seq_id)
            row = self._rows.release(seq_id)
            if row is not None:
                if row in self._sampling.penalised:
                    adapter.sampler_forget(seq_id)
                self._sampling.release(row)
        for seq in plan.new_seqs:
            row = self._rows.add(seq)
            self._sampling.add(row, seq)
            self._scoring.add(seq)
            self._pooling.add(seq)
            if row in self._sampling.penalised:
                adapter.sampler_reset(seq.seq_id, seq.token_ids[: seq.num_prompt_tokens])
                if len(seq.token_ids) > seq.num_prompt_tokens:
                    adapter.sampler_accept(seq.seq_id, seq.token_ids[seq.num_prompt_tokens :])
        for shift in plan.shifts:
            self._shift_context(adapter, shift)
        for seq_id, blocks in plan.new_blocks.items():
            self._rows.append_blocks(seq_id, blocks)
        step = self._buffers.fill_tokens(plan)
        if self._scoring:
            step.scored = self._scoring.mark(plan, step.logits_mask, self._rows)
        if self._pooling:
            step.pooling, step.pooled = self._pooling.mark(plan)
        return step

    def _shift_context(self, adapter: ModelAdapter, shift: ContextShift) -> None:
        rows = self._rows
        row = rows.row_of[shift.seq_id]
        length = int(rows.num_blocks[row]) * rows.block_size
        self._sampling.shift(row, length, shift.dropped, rows.tokens[row])
        moves = rows.shift(shift)
        if len(moves.copy_from):
            adapter.copy_slots(moves.copy_from, moves.copy_to)
        adapter.shift_slots(moves.rotated, moves.deltas)

    def build_attention_metadata(self, step: PreparedStep) -> AttentionMetadata:
        return self._buffers.fill_attention(step)

    def run_model_forward(
        self, step: ModelStepInput, attention: AttentionMetadata
    ) -> ForwardOutput:
        with self._native_timer:
            return self._open_adapter().forward(step, attention)

    def sample(self, forward: ForwardOutput, drawing: Drawing) -> Drawn:
        """Draw a token for each sequence of the step that wants one, in the plan's order."""
        try:
            return Drawn(drawing, self._draw(forward, drawing), {}, forward)
        except InvalidInputError:  # nothing is left to draw for one: not the others' fault
            failed = self._find_failing(forward, drawing)
            good = [i for i, s in enumerate(self._seq_ids(drawing)) if s not in failed]
            drawing = drawing.only(np.array(good, dtype=np.int64))
            return Drawn(drawing, self._draw(forward, drawing), failed, forward)

    def _seq_ids(self, drawing: Drawing) -> list[int]:
        ids: list[int] = self._rows.seq_ids[drawing.rows].tolist()
        return ids

    def _draw(self, forward: ForwardOutput, drawing: Drawing) -> NDArray[np.int32]:
        if not len(drawing.rows):
            return np.zeros(0, dtype=np.int32)
        metadata = self._metadata(drawing, output_rows(forward, drawing.tokens))
        with self._native_timer:
            return self._open_adapter().sample(metadata)

    def _metadata(self, drawing: Drawing, rows: NDArray[np.int64]) -> SamplingMetadata:
        """How those that draw do it; `rows`: where their logits are."""
        known = self._rows
        return self._sampling.metadata(
            drawing.rows, rows, drawing.ends, known.seq_ids, known.tokens, known.dropped
        )

    def _find_failing(self, forward: ForwardOutput, drawing: Drawing) -> dict[int, str]:
        """Draw for each sequence alone, to see whose fault it was and why."""
        failed = {}
        for index, seq_id in enumerate(self._seq_ids(drawing)):
            try:
                self._draw(forward, drawing.only(np.array([index])))
            except InvalidInputError as error:
                failed[seq_id] = str(error)
        return failed

    def postprocess(self, plan: SchedulerOutputs, drawn: Drawn) -> StepOutput:
        """Remember the drawn tokens for the next step and say whose they are."""
        sampling = self._sampling
        rows = drawn.drawing.rows
        if len(drawn.tokens) != len(rows):
            raise RuntimeError(f"{len(drawn.tokens)} tokens were drawn for {len(rows)} sequences")
        self._rows.tokens[rows, drawn.drawing.ends] = drawn.tokens
        seq_ids, tokens = self._seq_ids(drawn.drawing), drawn.tokens.tolist()
        sampled = {s: [t] for s, t in zip(seq_ids, tokens, strict=True)}
        output = StepOutput(plan.step_id, sampled, failed=drawn.failed)
        if sampling.penalised:
            for row, seq_id, token in zip(rows.tolist(), seq_ids, tokens, strict=True):
                if row in sampling.penalised:
                    self._open_adapter().sampler_accept(seq_id, (token,))
        for index in sampling.logprobs_wanted(rows):
            found = self._open_adapter().logprobs(index)
            if found is not None:
                entry = token_logprobs(tokens[index], found)
                named = sampling.named_tokens(int(rows[index]))
                if named is not None:
                    entry.top = self._logprobs_of(named, drawn, index, found.sampled)
                output.logprobs[seq_ids[index]] = [entry]
        return output

    def _logprobs_of(
        self, named: NDArray[np.int64], drawn: Drawn, index: int, logprob: float
    ) -> list[tuple[int, float]]:
        """Of the tokens that a request names; `logprob`: of the drawn one, in the same row."""
        row = output_rows(drawn.forward, drawn.drawing.tokens[index : index + 1])
        logits = self._open_adapter().logits_row(int(row[0])).astype(np.float64)
        values = logits[named] - (logits[drawn.tokens[index]] - logprob)
        return list(zip(named.tolist(), values.tolist(), strict=True))

    # ---- measuring -----------------------------------------------------------------------------

    def profile(self, reset: bool = False) -> dict[str, Any]:
        """Seconds per stage and inside the model since the start or the last reset.

        The model's own stages are among `stages` as "native_...", and how often each was entered is
        in `counts`; they are parts of run_model_forward and sample.
        """
        native = {} if self.adapter is None else self.adapter.profile(reset)
        own = {stage: timer.seconds for stage, timer in self._timers.items()}
        result = {
            "rank": self.rank,
            "steps": self._steps,
            "native_seconds": self._native_timer.seconds,
            "stages": own | {f"native_{stage}": seconds for stage, (seconds, _) in native.items()},
            "counts": {f"native_{stage}": count for stage, (_, count) in native.items()},
        }
        if reset:
            for timer in (*self._timers.values(), self._native_timer):
                timer.seconds = 0.0
            self._steps = 0
        return result


class Timer:
    """Adds up the seconds spent inside its `with` blocks, which must not be nested."""

    __slots__ = ("_start", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start


def token_logprobs(token: int, found: RowLogprobs) -> TokenLogprobs:
    top = list(zip(found.top_ids, found.top_logprobs, strict=True))
    return TokenLogprobs(token, found.sampled, found.sampled_rank, top)


def output_rows(forward: ForwardOutput, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The output row of each token index in `wanted`, whatever order the model keeps them in."""
    ids = forward.output_ids[: forward.n_outputs].astype(np.int64)
    if len(ids) == len(wanted) and (ids == wanted).all():
        return np.arange(len(wanted), dtype=np.int64)
    order = np.argsort(ids, kind="stable")
    places = np.searchsorted(ids, wanted, sorter=order)
    found = order[np.minimum(places, len(order) - 1)] if len(order) else order
    if len(found) != len(wanted) or not np.array_equal(ids[found], wanted):
        raise RuntimeError(
            f"the model kept rows for tokens {ids.tolist()[:8]}, wanted {wanted.tolist()[:8]}"
        )
    return found
