"""Decides which requests get drafts and how long they are, from the measured acceptance rate.

A draft token costs time and saves one step when it is accepted. The length of a draft maximises the
expected tokens per second: the acceptance rate is estimated per sequence, the cost of a draft token
by `DraftCosts`. Sequences with a low acceptance rate try a single draft token at growing intervals.

Drafts follow the newest token, so a step with drafts is scheduled when no step is in flight. With
asynchronous scheduling `should_wait` decides whether to wait for that.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from llaisys.common.request import Request
from llaisys.common.types import SchedulerOutputs, StepOutput
from llaisys.engine.config import SpeculativeConfig
from llaisys.engine.speculative.costs import DraftCosts
from llaisys.engine.speculative.proposer import Draft, DraftModelProposer, NgramProposer, Proposer

FIRST_RATE = 0.7
WEIGHT = 0.1  # of the newest draft token in the acceptance rate
MAX_MISSES = 4  # consecutive rejected drafts before pauses of 2, 4, 8 .. MAX_PAUSE steps
MAX_PAUSE = 64


@dataclass(slots=True)
class SpeculativeStats:
    num_drafts: int = 0  # verified; one per request and step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)  # by position in the draft

    @property
    def mean_accepted_length(self) -> float:
        """Mean tokens per verified draft, including the token sampled after it."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0


@dataclass(slots=True)
class AcceptanceTracker:
    """Acceptance of the drafts of one sequence."""

    max_misses: int  # consecutive drafts without an accepted token that start no pause
    rate: float = FIRST_RATE  # probability that a draft token is accepted after an accepted one
    misses: int = 0  # consecutive drafts without an accepted token
    pause: int = 0  # steps until the next draft
    is_awaited: bool = False  # a step waited because a draft was expected

    def update(self, drafted: int, accepted: int) -> None:
        if accepted and self.misses > self.max_misses:
            self.rate = FIRST_RATE  # after pauses: the text has changed
        self.rate = 1 - (1 - self.rate) * (1 - WEIGHT) ** accepted
        if accepted < drafted:
            self.rate -= WEIGHT * self.rate
        self.misses = 0 if accepted else self.misses + 1
        over = self.misses - self.max_misses
        self.pause = min(MAX_PAUSE, 1 << over) if over > 0 else 0

    def is_due(self, price: float, most: int) -> bool:
        """Whether the next step may have a draft; if not, counts one step of the pause or starts
        one."""
        if self.pause <= 1 and (self.pause or best_length(self.rate, price, most)):
            return True
        self.pause = self.pause - 1 if self.pause else MAX_PAUSE
        return False

    def next_length(self, price: float, most: int) -> int:
        """Return the length of the draft for the next step; 0: none."""
        if not self.is_due(price, most):
            return 0
        self.pause = 0
        return max(1, best_length(self.rate, price, most))


_Trackers = dict[int, AcceptanceTracker]  # by sequence id


class Speculator:
    """Sets drafts of requests before a step is scheduled and observes its result."""

    def __init__(
        self,
        config: SpeculativeConfig,
        proposer: Proposer,
        vocab_size: int,
        first: NgramProposer | None = None,  # asked before `proposer`
    ) -> None:
        self.config = config
        self.proposer = proposer
        self.costs = DraftCosts()
        self.stats = SpeculativeStats()
        self.stats.accepted_per_position = [0] * config.num_speculative_tokens
        self._vocab_size = vocab_size
        self._first = first
        self._trackers: _Trackers = defaultdict(lambda: AcceptanceTracker(MAX_MISSES))
        self._first_trackers: _Trackers = defaultdict(lambda: AcceptanceTracker(max_misses=0))
        self._proposed: _Trackers = {}  # of the latest drafts
        self._is_catching_up = False  # see Proposer; in the next step

    def _sources(self) -> list[tuple[Proposer, _Trackers]]:
        sources: list[tuple[Proposer, _Trackers]] = [(self.proposer, self._trackers)]
        if self._first is not None:
            sources.insert(0, (self._first, self._first_trackers))
        return sources

    # ---- before a step -------------------------------------------------------------------------

    @property
    def trackers(self) -> dict[int, AcceptanceTracker]:
        """By sequence id."""
        return self._trackers

    def propose(self, running: Sequence[Request]) -> None:
        """Set `draft_token_ids` of the running requests that get drafts in the next step."""
        self._is_catching_up = False
        if self._is_disabled(len(running)):
            return
        price = self.costs.price(len(running))
        requests = [
            request
            for request in running
            if request.num_tokens - request.num_computed_tokens == 1
            and request.num_tokens + 1 < request.max_total_tokens
        ]
        for proposer, trackers in self._sources():
            self._propose(proposer, trackers, requests, price)
            requests = [request for request in requests if not request.draft_token_ids]

    def _propose(
        self, proposer: Proposer, trackers: _Trackers, requests: Sequence[Request], price: float
    ) -> None:
        most = self.config.num_speculative_tokens
        chosen, counts = [], []
        for request in requests:
            tracker = trackers[request.seq_id]
            length = tracker.next_length(price, most)
            if length:
                room = request.max_total_tokens - request.num_tokens - 1
                chosen.append(request)
                counts.append(min(room, most if proposer.limits_length else length))
        if not chosen:
            return
        drafts = proposer.propose(chosen, counts)
        self._is_catching_up |= proposer.is_catching_up
        for request, limit, draft in zip(chosen, counts, drafts, strict=True):
            request.draft_token_ids = self._valid(draft, limit)
            self._proposed[request.seq_id] = tracker = trackers[request.seq_id]
            if tracker.is_awaited and not draft:
                tracker.update(1, 0)  # costs as much as a rejected draft
            tracker.is_awaited = False

    def should_wait(self, running: Sequence[Request]) -> bool:
        """Whether the next step should wait for the step in flight because drafts are likely."""
        if self._is_disabled(len(running)):
            return False
        found, most = False, self.config.num_speculative_tokens
        price = self.costs.price(len(running))
        for request in running:
            room = request.max_total_tokens - request.num_tokens - 2
            if room < 1 or request.num_tokens != request.num_computed_tokens:
                continue
            for proposer, trackers in self._sources():
                tracker = trackers[request.seq_id]
                if tracker.is_due(price, most):
                    tracker.is_awaited = proposer.expects_draft(request)
                    found |= tracker.is_awaited
        return found

    def needs_sync(self, plan: SchedulerOutputs) -> bool:
        """Whether the proposer must observe the hidden states of a step."""
        observed = self.proposer.num_observed_steps
        if not observed or plan.batch_size >= self.config.disable_by_batch_size:
            return False
        trackers = [self._trackers.get(seq_id) for seq_id in plan.seq_ids]
        return any(tracker is None or tracker.pause <= observed for tracker in trackers)

    def _is_disabled(self, count: int) -> bool:
        """Whether a step of `count` requests has no drafts."""
        is_large = count >= self.config.disable_by_batch_size
        return is_large or self.costs.needs_plain_step(count)

    def _valid(self, draft: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens before the first that is not in the vocabulary."""
        valid = list(draft[:count])
        for index, token in enumerate(valid):
            if not 0 <= token < self._vocab_size:
                return valid[:index]
        return valid

    # ---- after a step --------------------------------------------------------------------------

    def observe(self, plan: SchedulerOutputs, output: StepOutput, seconds: float | None) -> None:
        """Count accepted drafts and release finished sequences. `seconds`: duration of the step;
        None: not measured for this step alone."""
        for seq_id in plan.released_seq_ids:
            self._proposed.pop(seq_id, None)
            for proposer, trackers in self._sources():
                trackers.pop(seq_id, None)
                proposer.release(seq_id)
        for seq_id, draft in plan.draft_token_ids.items():
            accepted = len(output.sampled.get(seq_id, ())) - 1
            if accepted >= 0:  # else sampling failed and the request ends
                self._count(len(draft), accepted)
                self._proposed[seq_id].update(len(draft), accepted)
        is_decode = not plan.num_prefill_tokens and not self._is_catching_up
        if is_decode and seconds is not None:
            drafts = plan.num_decode_tokens - plan.batch_size
            self.costs.add_step(plan.batch_size, drafts, seconds)

    def _count(self, drafted: int, accepted: int) -> None:
        stats = self.stats
        stats.num_drafts += 1
        stats.num_draft_tokens += drafted
        stats.num_accepted_tokens += accepted
        for position in range(accepted):
            stats.accepted_per_position[position] += 1


def best_length(rate: float, price: float, most: int) -> int:
    """Return the number of draft tokens, up to `most`, with the most tokens per second: n of them
    yield 1 + rate + .. + rate^n tokens on average and take 1 + n * price."""
    best, best_speed = 0, 1.0
    tokens, chance = 1.0, 1.0
    for count in range(1, most + 1):
        chance *= rate
        tokens += chance
        speed = tokens / (1 + count * price)
        if speed <= best_speed:
            break
        best, best_speed = count, speed
    return best


def make_speculator(
    config: SpeculativeConfig | None, vocab_size: int, draft: Draft
) -> Speculator | None:
    """Return the configured speculator; None: no drafts. `draft`: calls the draft model."""
    if config is None:
        return None
    if not config.has_weights:
        ngram = NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
        return Speculator(config, ngram, vocab_size)
    first = None
    if config.is_head:  # only the longest n-grams replace drafts of the head
        first = NgramProposer(config.prompt_lookup_max, config.prompt_lookup_max)
    return Speculator(config, DraftModelProposer(draft, config.is_head), vocab_size, first)
