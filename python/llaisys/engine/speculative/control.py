"""Who gets drafts, how many, and what came of them.

A draft costs time and saves the step of a token when it is accepted. A request's drafts are as long
as pays best: `rate` is the chance that its next draft is accepted, as its last ones say, and the
price of one is learned by `DraftCosts`. A request that cannot be guessed tries a single draft now
and then, more and more rarely.

Drafts follow the newest token, so a step that may have some is planned when the steps before it are
done. Where steps are launched ahead, `waits` says beforehand whether that is worth while.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from llaisys.common.request import Request
from llaisys.common.types import SchedulerOutputs, StepOutput
from llaisys.engine.config import SpeculativeConfig
from llaisys.engine.speculative.costs import DraftCosts
from llaisys.engine.speculative.draft_model import Draft, DraftModelProposer
from llaisys.engine.speculative.ngram import NgramProposer
from llaisys.engine.speculative.ngram_then_head import NgramThenHead
from llaisys.engine.speculative.proposer import Proposer

FIRST_RATE = 0.7
LONGEST_PAUSE = 64  # steps
# Of a source that is right in streaks, and of a steady one: the weight of the newest draft token in
# the rate, and the drafts in a row that may be all wrong before there is a pause.
_SPEED, _PATIENCE = (0.25, 0.1), (2, 6)


@dataclass(slots=True)
class SpeculativeStats:
    num_drafts: int = 0  # verified; one a request and step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)  # drafts accepted up to there

    @property
    def mean_accepted_length(self) -> float:
        """Tokens that a draft brought, the one that is drawn behind it included."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0


@dataclass(slots=True)
class AcceptanceTracker:
    """How one sequence has been doing."""

    is_steady: bool = False  # as the source of its drafts says
    rate: float = FIRST_RATE  # chance that a draft token is accepted when the one before it was
    misses: int = 0  # drafts in a row of which nothing was accepted
    pause: int = 0  # steps until a draft is tried
    is_awaited: bool = False  # a step waited for tokens because a draft was foreseen

    def learn(self, drafted: int, accepted: int) -> None:
        speed = _SPEED[self.is_steady]
        self.rate = 1 - (1 - self.rate) * (1 - speed) ** accepted
        if accepted < drafted:
            self.rate -= speed * self.rate
        self.misses = 0 if accepted else self.misses + 1
        over = self.misses - _PATIENCE[self.is_steady]
        self.pause = min(LONGEST_PAUSE, 1 << over) if over > 0 else 0

    def is_due(self, price: float, most: int) -> bool:
        """Whether the next step may have a draft. When it may not, there will be none: the pause
        goes on by one step, or begins."""
        if self.pause <= 1 and (self.pause or best_length(self.rate, price, most)):
            return True
        self.pause = self.pause - 1 if self.pause else LONGEST_PAUSE
        return False

    def next_length(self, price: float, most: int) -> int:
        """Of the draft for the next step; 0: none."""
        length = best_length(self.rate, price, most)
        if self.pause:
            self.pause -= 1
            return 0 if self.pause else max(1, length)
        if not length:
            self.pause = LONGEST_PAUSE
        return length


class Speculator:
    """Puts drafts into requests before a step is planned and learns from its result."""

    def __init__(self, config: SpeculativeConfig, proposer: Proposer, vocab_size: int) -> None:
        self.config = config
        self.proposer = proposer
        self.costs = DraftCosts()
        self.stats = SpeculativeStats()
        self.stats.accepted_per_position = [0] * config.num_speculative_tokens
        self._vocab_size = vocab_size
        self._trackers: dict[int, AcceptanceTracker] = {}

    # ---- before a step -------------------------------------------------------------------------

    def propose(self, running: Sequence[Request]) -> None:
        """Set `draft_token_ids` of those running requests that can use drafts in the next step."""
        count = len(running)
        if self._goes_without(count):
            return
        price, most = self.costs.price(count), self.config.num_speculative_tokens
        requests, counts = [], []
        for request in running:
            room = request.max_total_tokens - request.num_tokens - 1
            if room < 1 or request.num_tokens - request.num_computed_tokens != 1:
                continue
            course = self._trackers.get(request.seq_id)
            if course is None:
                course = self._trackers[request.seq_id] = AcceptanceTracker(self.proposer.is_steady)
                length = course.next_length(self.costs.first_price(count), most)
            else:
                length = course.next_length(price, most)
            if length:
                requests.append(request)
                counts.append(min(room, most if self.proposer.stops_itself else length))
        if not requests:
            return
        begin = time.perf_counter()
        drafts = self.proposer.propose(requests, counts)
        if self.proposer.is_catching_up:
            self.costs.note_catching_up(time.perf_counter() - begin)
        for request, wanted, draft in zip(requests, counts, drafts, strict=True):
            request.draft_token_ids = self._usable(draft, wanted)
            course = self._trackers[request.seq_id]
            if course.is_awaited and not draft and not course.is_steady:
                course.learn(1, 0)  # as dear as a draft that was wrong
            course.is_awaited = False

    def waits(self, running: Sequence[Request]) -> bool:
        """Whether the step to be planned, of which some tokens are drawn by one that is out, waits
        for them because it will probably have drafts."""
        count, found = len(running), False
        if self._goes_without(count):
            return False
        price, most = self.costs.price(count), self.config.num_speculative_tokens
        for request in running:
            room = request.max_total_tokens - request.num_tokens - 2
            if room < 1 or request.num_tokens != request.num_computed_tokens:
                continue
            course = self._trackers.get(request.seq_id)
            if course is None or course.is_due(price, most):
                is_foreseen = self.proposer.foresees(request)
                if course is not None:
                    course.is_awaited = is_foreseen
                found |= is_foreseen
        return found

    def looks_on(self, plan: SchedulerOutputs) -> bool:
        """Whether the source of drafts has to see what a step computes."""
        watched = self.proposer.steps_watched
        if not watched or plan.batch_size >= self.config.disable_by_batch_size:
            return False
        courses = [self._trackers.get(seq_id) for seq_id in plan.seq_ids]
        return any(course is None or course.pause <= watched for course in courses)

    def _goes_without(self, count: int) -> bool:
        """Whether nobody gets drafts in a step of so many requests, whatever was learned."""
        many = count >= self.config.disable_by_batch_size
        return many or self.costs.wants_plain_step(count)

    def _usable(self, draft: Sequence[int], count: int) -> list[int]:
        """The tokens before the first that the model does not have."""
        usable = list(draft[:count])
        for index, token in enumerate(usable):
            if not 0 <= token < self._vocab_size:
                return usable[:index]
        return usable

    # ---- after it ------------------------------------------------------------------------------

    def observe(self, plan: SchedulerOutputs, output: StepOutput, seconds: float | None) -> None:
        """Take in what a step made of its drafts, and forget the sequences that have gone.
        `seconds`: that it took; None: they are not a step's alone."""
        for seq_id in plan.released_seq_ids:
            self._trackers.pop(seq_id, None)
            self.proposer.forget(seq_id)
        for seq_id, draft in plan.draft_token_ids.items():
            accepted = len(output.sampled.get(seq_id, ())) - 1
            if accepted >= 0:  # else nothing could be drawn, and the request ends
                self._count(len(draft), accepted)
                self.costs.note_drafts(len(draft))
                self._trackers[seq_id].learn(len(draft), accepted)
        is_clean = not plan.num_prefill_tokens and not self.proposer.is_catching_up
        if is_clean and seconds is not None:
            drafts = plan.num_decode_tokens - plan.batch_size
            self.costs.note(plan.batch_size, drafts, seconds)

    def _count(self, drafted: int, accepted: int) -> None:
        stats = self.stats
        stats.num_drafts += 1
        stats.num_draft_tokens += drafted
        stats.num_accepted_tokens += accepted
        for position in range(accepted):
            stats.accepted_per_position[position] += 1


def best_length(rate: float, price: float, most: int) -> int:
    """The number of draft tokens, up to `most`, that brings the most tokens for the time: n of them
    bring 1 + rate + .. + rate^n tokens on average and take as long as 1 + n * price."""
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
    """What a configuration asks for; None: no drafts. `draft`: how to ask a model for them."""
    if config is None:
        return None
    proposer: Proposer
    if config.has_weights:
        proposer = DraftModelProposer(draft, config.is_head)
        if config.is_head:  # all of the tokens in common that count, lest it is asked for nothing
            own = NgramProposer(config.prompt_lookup_max, config.prompt_lookup_max)
            proposer = NgramThenHead(own, proposer)
    else:
        proposer = NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    return Speculator(config, proposer, vocab_size)
