"""Turns sampled token ids into text, finds stop strings, and builds stream and final outputs.

Stop strings are searched in the text, so they may span tokens; a prefix of a stop string at the end
of the text is not streamed yet. The concatenated stream parts of a request are its final text.
Output that is not streamed is detokenized in batches, so that the end of many long choices in one
step costs no more than another step.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from llaisys.common.repetition import DETECTED
from llaisys.common.request import Request, RequestStatus
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import (
    CompletionOutput,
    PromptLogprobs,
    PromptProgress,
    RequestOutput,
    StreamOutput,
    Timings,
    TokenLogprobs,
    TokenUpdate,
    Usage,
)
from llaisys.engine.stop_strings import StopStringFinder, StopStrings

DECODE_BATCH = 256  # tokens of a choice that is not streamed
NEVER = sys.maxsize


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Options of an output beside the sampling parameters."""

    visible_ids: frozenset[int] = frozenset()  # special tokens that keep their text
    progress: bool = False  # report prompt progress in a stream
    # Seconds after the first token from which on the output ends at a line break.
    line_seconds: float | None = None
    # Makes a check per choice, which gets each new text; true ends the output after it.
    end_check: Callable[[], Callable[[str], bool]] | None = None


DEFAULT_OUTPUT_OPTIONS = OutputOptions()


@dataclass(slots=True)
class _Choice:
    """The growing output of one request."""

    request: Request
    group: _Group
    detokenizer: Any  # None: no text
    finder: StopStringFinder | None
    stream: bool
    eager: bool  # text is needed in every step: streamed, searched or timed
    decode_at: int  # if not eager: number of tokens at the next detokenization
    decoded: int = 0  # if not eager: detokenized tokens
    token_ids: list[int] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    first_token_time: float | None = None
    line_seconds: float | None = None  # see OutputOptions
    has_line: bool = False  # has a line break; with line_seconds
    ends_after: Callable[[str], bool] | None = None  # see OutputOptions.end_check
    update: TokenUpdate | None = None  # the last one, when finished


@dataclass(slots=True)
class _Group:
    """The choices of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput | None]
    missing: int
    prompt_logprobs: list[TokenLogprobs] | None = None  # when requested
    logprobs_sent: bool = False  # in a stream
    pooled: bytes | None = None

    def add_logprobs(self, part: PromptLogprobs) -> None:
        """Store prompt logprobs by position; recomputed ones are equal."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = [TokenLogprobs(self.prompt_token_ids[0], math.nan, 0)]
        self.prompt_logprobs[part.start : part.start + len(part.entries)] = part.entries


class OutputProcessor:
    """One entry per unfinished request."""

    def __init__(self, tokenizer: Any = None, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self._choices: dict[str, _Choice] = {}
        self._last_stops = StopStrings(())

    @property
    def num_choices(self) -> int:
        """Unfinished choices."""
        return len(self._choices)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        requests: list[Request],
        stream: bool,
        options: OutputOptions = DEFAULT_OUTPUT_OPTIONS,
    ) -> None:
        """Add the requests of one prompt."""
        group = _Group(
            request_id,
            prompt,
            requests[0].prompt_token_ids,
            [None] * len(requests),
            len(requests),
        )
        if params.prompt_logprobs is not None:  # also for a prompt of one token
            group.add_logprobs(PromptLogprobs(1, []))
        stops = self._stop_strings(tuple(params.stop or ()))
        for request in requests:
            detokenizer, finder = None, None
            if params.detokenize and self.tokenizer is not None:
                extra = {"visible_ids": options.visible_ids} if options.visible_ids else {}
                detokenizer = self.tokenizer.detokenizer(params.skip_special_tokens, **extra)
                if params.stop:
                    finder = StopStringFinder(stops, params.include_stop_str_in_output)
            checked = options.line_seconds is not None or options.end_check is not None
            needs_text = stream or finder is not None or checked
            eager = detokenizer is not None and needs_text
            decode_at = NEVER
            if detokenizer is not None and not eager:  # staggered by choice
                decode_at = DECODE_BATCH - request.choice % DECODE_BATCH
            self._choices[request.request_id] = _Choice(
                request,
                group,
                detokenizer,
                finder,
                stream,
                eager,
                decode_at,
                logprobs=None if params.logprobs is None else [],
                line_seconds=options.line_seconds,
                ends_after=None if options.end_check is None else options.end_check(),
            )

    def _stop_strings(self, strings: tuple[str, ...]) -> StopStrings:
        if strings != self._last_stops.strings:  # the prompts of one request share them
            self._last_stops = StopStrings(strings)
        return self._last_stops

    def process(self, updates: list[TokenUpdate]) -> tuple[list[StreamOutput], list[str]]:
        """Return (new outputs, requests to end because of a stop string or their options).
        Requests that do not stream report only their end. Tokens of finished requests are
        discarded."""
        now = time.monotonic()
        outputs: list[StreamOutput] = []
        stopped: list[str] = []
        find_choice = self._choices.get
        for update in updates:
            choice = find_choice(update.request_id)
            if choice is None:
                continue
            if update.prompt_logprobs is not None:
                choice.group.add_logprobs(update.prompt_logprobs)
            progress = None
            if choice.request.reports_progress:
                progress = self._progress(choice, update, now)
            if not update.token_ids and not update.status.finished:  # its prompt is being computed
                if progress is not None:
                    part = StreamOutput(choice.group.request_id, choice.request.choice, "", [])
                    part.progress = progress
                    outputs.append(part)
                continue
            if update.pooled is not None:
                choice.group.pooled = update.pooled
            token_ids = update.token_ids
            choice.token_ids.extend(token_ids)
            if choice.first_token_time is None and token_ids:
                choice.first_token_time = now
            if choice.logprobs is not None and update.logprobs:
                choice.logprobs += update.logprobs
            done = update.status.finished
            text = ""
            if choice.eager:
                count = len(update.token_ids)
                text, stop, ended = self._new_text(choice, update)
                status = _end_at_line(choice, text, now) if not done else None
                if stop is not None or len(update.token_ids) < count or (ended and not done):
                    status = RequestStatus.FINISHED_STOPPED
                if status is not None:
                    if not done:
                        stopped.append(update.request_id)
                    update.status, update.stop_reason = status, stop
                    done = True
            if done:
                outputs.append(self._end(choice, update, text, now))
                outputs[-1].progress = progress
            elif len(choice.token_ids) >= choice.decode_at:
                self._decode(choice)
            elif choice.stream:
                outputs.append(
                    StreamOutput(
                        choice.group.request_id,
                        choice.request.choice,
                        text,
                        token_ids,
                        None,
                        update.logprobs,
                        prompt_logprobs=self._take_prompt_logprobs(choice),
                        progress=progress,
                    )
                )
        return outputs, stopped

    @staticmethod
    def _progress(choice: _Choice, update: TokenUpdate, now: float) -> PromptProgress | None:
        """Return the prompt progress up to the first token."""
        if choice.first_token_time is not None:
            return None
        total = len(choice.group.prompt_token_ids)
        done = total if update.token_ids else update.num_computed_prompt_tokens
        if not choice.stream or not done:
            return None
        seconds = now - (now if update.scheduled_time is None else update.scheduled_time)
        return PromptProgress(total, update.num_cached_tokens, done, seconds)

    def _take_prompt_logprobs(self, choice: _Choice) -> list[TokenLogprobs] | None:
        """Return the prompt logprobs once, for the first part of a stream."""
        group = choice.group
        if group.logprobs_sent:
            return None
        group.logprobs_sent = True
        return group.prompt_logprobs

    def _new_text(self, choice: _Choice, update: TokenUpdate) -> tuple[str, str | None, bool]:
        """Return the new text of an update, the stop string in it, and whether the options end the
        output after it. Tokens after either are removed. Text before `min_tokens` is not searched.
        """
        token_ids, ends_after = update.token_ids, choice.ends_after
        if choice.finder is None and ends_after is None and not update.status.finished:
            text = choice.detokenizer.add_all(token_ids)
            choice.parts.append(text)
            return text, None, False
        parts, stop, ended = [], None, False
        first = choice.request.sampling.min_tokens - (len(choice.token_ids) - len(token_ids)) - 1
        ending = update.status is RequestStatus.FINISHED_STOPPED
        for index, token in enumerate(token_ids):
            if ending and index == len(token_ids) - 1 and not self._includes_stop(choice):
                break
            piece = choice.detokenizer.add(token)
            if choice.finder is not None and index >= first:
                piece, stop = choice.finder.add(piece)
            parts.append(piece)
            ended = ends_after is not None and ends_after(piece)
            if stop is not None or ended:
                surplus = len(token_ids) - index - 1
                if surplus:
                    del choice.token_ids[-surplus:], token_ids[-surplus:]
                    if update.logprobs:
                        del update.logprobs[index + 1 :]
                break
        text = "".join(parts)
        if text:
            choice.parts.append(text)
        return text, stop, ended

    def _decode(self, choice: _Choice) -> None:
        """Detokenize the tokens of a choice that is not eager; none of them ends it."""
        choice.parts.append(choice.detokenizer.add_all(choice.token_ids[choice.decoded :]))
        choice.decoded = len(choice.token_ids)
        choice.decode_at = choice.decoded + DECODE_BATCH

    def _includes_stop(self, choice: _Choice) -> bool:
        """Whether the text of the stop token is part of the output."""
        return choice.request.sampling.include_stop_str_in_output

    def _end(self, choice: _Choice, update: TokenUpdate, text: str, now: float) -> StreamOutput:
        """Return the last part of a choice, with the final output after the last choice."""
        found_stop = isinstance(update.stop_reason, str) and update.stop_reason != DETECTED
        if choice.detokenizer is not None and not found_stop:
            text += self._rest_of_text(choice, update)
        self._choices.pop(update.request_id, None)
        group, index = choice.group, choice.request.choice
        group.outputs[index] = self._completion(choice, update, now)
        group.missing -= 1
        return StreamOutput(
            group.request_id,
            index,
            text,
            update.token_ids,
            update.status.finish_reason,
            update.logprobs,
            update.stop_reason,
            None if group.missing else self._request_output(group),
            self._take_prompt_logprobs(choice),
        )

    def _rest_of_text(self, choice: _Choice, update: TokenUpdate) -> str:
        """Return the pending text of the detokenizer and the finder, and of tokens without text."""
        text = ""
        if not choice.eager:
            ids = choice.token_ids[choice.decoded :]
            if update.status is RequestStatus.FINISHED_STOPPED and not self._includes_stop(choice):
                ids = ids[:-1]
            text = choice.detokenizer.add_all(ids)
        elif choice.finder is not None:
            text = choice.finder.flush()
        text += choice.detokenizer.finish()
        if text:
            choice.parts.append(text)
        return text

    def _completion(self, choice: _Choice, update: TokenUpdate, now: float) -> CompletionOutput:
        arrival = choice.request.arrival_time
        first, count = choice.first_token_time, len(choice.token_ids)
        logprobs = choice.logprobs[:count] if choice.logprobs is not None else None
        return CompletionOutput(
            index=choice.request.choice,
            text="".join(choice.parts),
            token_ids=choice.token_ids,
            finish_reason=update.status.finish_reason,
            stop_reason=update.stop_reason,
            status=update.status,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sum(p.logprob for p in logprobs),
            num_cached_tokens=update.num_cached_tokens,
            num_host_cached_tokens=update.num_host_cached_tokens,
            timings=Timings(
                queue=None if update.scheduled_time is None else update.scheduled_time - arrival,
                first_token=None if first is None else first - arrival,
                total=now - arrival,
                per_token=(now - first) / (count - 1) if first is not None and count > 1 else None,
            ),
            error=update.error,
            seed=choice.request.seed,
        )

    def _request_output(self, group: _Group) -> RequestOutput:
        outputs = [output for output in group.outputs if output is not None]
        usage = Usage(
            prompt_tokens=len(group.prompt_token_ids),
            completion_tokens=sum(len(output.token_ids) for output in outputs),
            cached_tokens=outputs[0].num_cached_tokens,
            host_cached_tokens=outputs[0].num_host_cached_tokens,
        )
        return RequestOutput(
            group.request_id,
            group.prompt,
            group.prompt_token_ids,
            outputs,
            usage,
            group.prompt_logprobs,
            group.pooled,
        )


def _end_at_line(choice: _Choice, text: str, now: float) -> RequestStatus | None:
    """Return how `line_seconds` ends a choice after `text`; None: it continues."""
    if choice.line_seconds is None:
        return None
    choice.has_line = choice.has_line or "\n" in text
    first = choice.first_token_time
    if choice.has_line and first is not None and now - first >= choice.line_seconds:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    return None
