"""Steps that the device samples, so that the next one is launched before this one is collected.

Until its tokens are known on the host, the row of a sequence in the input batch holds -1-j, j being
the row of the sampling batch, and the model replaces it. Nothing else of the next step may depend
on the token.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llaisys.common.errors import InvalidInputError
from llaisys.common.step import AttentionMetadata
from llaisys.common.types import SchedulerOutputs, StepOutput
from llaisys.engine.worker.in_flight import InFlightStep, InFlightSteps
from llaisys.engine.worker.sampler import Sampler
from llaisys.engine.worker.step_buffers import PreparedStep, StepBuffers
from llaisys.engine.worker.timers import StageTimers
from llaisys.models.base import ModelAdapter


class QueuedSteps:
    """Launches and collects them."""

    def __init__(
        self,
        adapter: ModelAdapter,
        in_flight: InFlightSteps,
        sampler: Sampler,
        timers: StageTimers,
    ) -> None:
        self._adapter = adapter
        self._in_flight = in_flight
        self._sampler = sampler
        self._timers = timers

    def launch(
        self,
        plan: SchedulerOutputs,
        step: PreparedStep,
        attention: AttentionMetadata,
        buffers: StepBuffers,  # of the step
    ) -> None:
        with self._timers["sample"]:
            sampling, logprob_rows = self._sampler.queued_metadata(step.sampling)
        launched = InFlightStep(
            plan,
            step,
            buffers=buffers,
            ticket=self._adapter.launch(step, attention, sampling),
            logprob_rows=logprob_rows,
            arrays=(attention, sampling),
        )
        self._in_flight.add(launched)
        self._in_flight.mark_unknown(step.sampling)

    def collect(self, launched: InFlightStep) -> StepOutput:
        step_id = launched.plan.step_id
        if not launched.plan.batch_size:  # no sequence was left when it was relaunched
            return StepOutput(step_id, {})
        try:
            with self._timers["run_model_forward"], self._timers.native:
                tokens = self._adapter.collect(launched.ticket)
        except Exception as error:
            return self._recover(launched, error)
        except BaseException:
            self._adapter.last_output()  # waits: the step reads its arrays until then
            raise
        if tokens is None:
            raise RuntimeError(f"step {step_id} was not run")
        with self._timers["postprocess"]:
            return self._output(launched, tokens)

    def _output(self, launched: InFlightStep, tokens: NDArray[np.int32]) -> StepOutput:
        self._in_flight.store_tokens(launched, tokens)
        seq_ids = launched.seq_ids
        sampled = {s: [t] for s, t in zip(seq_ids, tokens.tolist(), strict=True)}
        output = StepOutput(launched.plan.step_id, sampled)
        for index in launched.logprob_rows:
            entry = self._adapter.collected_logprobs(index)
            if entry is not None:
                output.logprobs[seq_ids[index]] = [entry]
        return output

    def _recover(self, launched: InFlightStep, error: Exception) -> StepOutput:
        """Handle a failed step; the step after it was not run. If one sequence caused the failure,
        sample the others, else raise. Then relaunch the next step without the lost sequences."""
        self._in_flight.store_tokens(launched, 0)  # replaces the placeholders
        forward = self._adapter.last_output()
        lost = frozenset(launched.plan.seq_ids)
        try:
            if not isinstance(error, InvalidInputError) or not forward.n_outputs:
                raise error
            present = self._in_flight.still_present(launched)
            with self._timers["sample"]:
                found = self._sampler.sample(forward, launched.step.sampling.select(present))
            lost = frozenset()
            for seq_id in launched.seq_ids:  # released sequences get no token
                if seq_id not in found.failed:
                    found.tokens.setdefault(seq_id, [])
            return found.output(launched.plan.step_id)
        finally:
            following = self._in_flight.pop()
            if following is not None:
                self._adapter.collect(following.ticket)
                self._relaunch(following, lost)

    def _relaunch(self, launched: InFlightStep, lost: frozenset[int]) -> None:
        """Launch a step again without these sequences."""
        plan, buffers = launched.plan, launched.buffers
        assert buffers is not None
        rest = [index for index, seq_id in enumerate(plan.seq_ids) if seq_id not in lost]
        plan = replace(
            plan,
            seq_ids=[plan.seq_ids[i] for i in rest],
            request_ids=[plan.request_ids[i] for i in rest],
            starts=[plan.starts[i] for i in rest],
            counts=[plan.counts[i] for i in rest],
            samples=[plan.samples[i] for i in rest],
        )
        if rest:
            step = buffers.fill_tokens(plan)
            self.launch(plan, step, buffers.fill_attention(step), buffers)
        else:
            self._in_flight.add(replace(launched, plan=plan))
