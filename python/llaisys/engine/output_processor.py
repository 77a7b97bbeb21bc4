"""From drawn token ids to text, stop strings, streams and final outputs.

Stop strings are searched in the text, so they may span tokens; while the end of the text could be
the beginning of a stop string it is held back from the stream. What a request's stream parts say,
put together, is its final text. Text that nobody waits for is made a piece at a time, so that the
end of many long choices in one step costs no more than any other step.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, field
from typing import Any

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

DECODED_AT_ONCE = 256  # tokens of a choice whose text is not needed at each step
NEVER = sys.maxsize


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the reader of an answer wants beside its text."""

    visible_ids: frozenset[int] = frozenset()  # special tokens that keep their text
    progress: bool = False  # how much of the prompt is done, in a stream
    # So long after its first token the answer ends, as soon as it has a line break.
    line_seconds: float | None = None


DEFAULT_OUTPUT_OPTIONS = OutputOptions()


@dataclass(slots=True)
class _Choice:
    """The growing output of one request."""

    request: Request
    group: _Group
    detokenizer: Any  # None: no text
    finder: StopStringFinder | None
    stream: bool
    eager: bool  # its text is needed at each step: streamed, searched, or timed
    decode_at: int  # tokens, when it is not: then their text is made
    decoded: int = 0  # of its tokens, when it is not eager
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    first_token_time: float | None = None
    line_seconds: float | None = None  # see OutputOptions
    has_line: bool = False  # a line break, where line_seconds wants to know
    update: TokenUpdate | None = None  # the last one, when finished


@dataclass(slots=True)
class _Group:
    """The choices of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput | None]
    missing: int
    scores: list[TokenLogprobs] | None = None  # of the prompt, when asked for
    scores_told: bool = False  # to a stream
    pooled: bytes | None = None

    def take_scores(self, scores: PromptLogprobs) -> None:
        """By position: what was computed twice is the same twice."""
        if self.scores is None:
            self.scores = [TokenLogprobs(self.prompt_token_ids[0], math.nan, 0)]
        self.scores[scores.start : scores.start + len(scores.entries)] = scores.entries


class OutputProcessor:
    """Keeps one entry per living request; a finished one is handed out and forgotten."""

    def __init__(self, tokenizer: Any = None, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self._choices: dict[str, _Choice] = {}
        self._last_stops = StopStrings(())

    def add(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        requests: list[Request],
        stream: bool,
        reading: OutputOptions = DEFAULT_OUTPUT_OPTIONS,
    ) -> None:
        """Expect the output of the requests of one prompt."""
        group = _Group(
            request_id,
            prompt,
            requests[0].prompt_token_ids,
            [None] * len(requests),
            len(requests),
        )
        if params.prompt_logprobs is not None:  # a prompt of one token has nothing else to score
            group.take_scores(PromptLogprobs(1, []))
        stops = self._stop_strings(tuple(params.stop or ()))
        for request in requests:
            detokenizer, finder = None, None
            if params.detokenize and self.tokenizer is not None:
                options = {"visible_ids": reading.visible_ids} if reading.visible_ids else {}
                detokenizer = self.tokenizer.detokenizer(params.skip_special_tokens, **options)
                if params.stop:
                    finder = StopStringFinder(stops, params.include_stop_str_in_output)
            is_watched = stream or finder is not None or reading.line_seconds is not None
            eager = detokenizer is not None and is_watched
            decode_at = NEVER
            if detokenizer is not None and not eager:  # the choices of a prompt take turns
                decode_at = DECODED_AT_ONCE - request.choice % DECODED_AT_ONCE
            self._choices[request.request_id] = _Choice(
                request,
                group,
                detokenizer,
                finder,
                stream,
                eager,
                decode_at,
                logprobs=None if params.logprobs is None else [],
                line_seconds=reading.line_seconds,
            )

    def _stop_strings(self, strings: tuple[str, ...]) -> StopStrings:
        if strings != self._last_stops.strings:  # the prompts of one request have the same
            self._last_stops = StopStrings(strings)
        return self._last_stops

    def process(self, updates: list[TokenUpdate]) -> tuple[list[StreamOutput], list[str]]:
        """(what is new, requests to end because of a stop string or of their time). Of a request
        that does not stream only its end is reported. Surplus tokens of requests that have ended
        are dropped."""
        now = time.monotonic()
        outputs: list[StreamOutput] = []
        stopped: list[str] = []
        find_choice = self._choices.get
        for update in updates:
            choice = find_choice(update.request_id)
            if choice is None:
                continue
            if update.prompt_logprobs is not None:
                choice.group.take_scores(update.prompt_logprobs)
            progress = None
            if choice.request.reports_progress:
                progress = self._progress(choice, update, now)
            if not update.token_ids and not update.status.finished:  # its prompt is on its way
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
                text, stop = self._new_text(choice, update)
                if stop is not None:
                    if not done:
                        stopped.append(update.request_id)
                    update.status = RequestStatus.FINISHED_STOPPED
                    update.stop_reason = stop
                    done = True
                elif choice.line_seconds is not None and not done and _is_over(choice, text, now):
                    stopped.append(update.request_id)
                    update.status = RequestStatus.FINISHED_LENGTH_CAPPED
                    done = True
            if done:
                outputs.append(self._end(choice, update, text, now))
                outputs[-1].progress = progress
            elif len(choice.token_ids) >= choice.decode_at:
                self._decode_piece(choice)
            elif choice.stream:
                outputs.append(
                    StreamOutput(
                        choice.group.request_id,
                        choice.request.choice,
                        text,
                        token_ids,
                        None,
                        update.logprobs,
                        prompt_logprobs=self._new_scores(choice),
                        progress=progress,
                    )
                )
        return outputs, stopped

    @staticmethod
    def _progress(choice: _Choice, update: TokenUpdate, now: float) -> PromptProgress | None:
        """Until the first token, which says that all is done."""
        if choice.first_token_time is not None:
            return None
        total = len(choice.group.prompt_token_ids)
        done = total if update.token_ids else update.num_computed_prompt_tokens
        if not choice.stream or not done:
            return None
        seconds = now - (now if update.scheduled_time is None else update.scheduled_time)
        return PromptProgress(total, update.num_cached_tokens, done, seconds)

    def _new_scores(self, choice: _Choice) -> list[TokenLogprobs] | None:
        """The prompt's logprobs, with the first part of a stream."""
        group = choice.group
        if group.scores_told:
            return None
        group.scores_told = True
        return group.scores

    def _new_text(self, choice: _Choice, update: TokenUpdate) -> tuple[str, str | None]:
        """The text that one step adds, and the stop string in it. Text before `min_tokens` is not
        searched."""
        if choice.finder is None and not update.status.finished:
            text = choice.detokenizer.add_all(update.token_ids)
            choice.pieces.append(text)
            return text, None
        parts, stop = [], None
        ending = update.status is RequestStatus.FINISHED_STOPPED
        for index, token in enumerate(update.token_ids):
            if ending and index == len(update.token_ids) - 1 and not self._shown(choice):
                break
            piece = choice.detokenizer.add(token)
            if choice.finder is not None:
                count = len(choice.token_ids) - len(update.token_ids) + index + 1
                if count < choice.request.sampling.min_tokens:
                    parts.append(piece)
                    continue
                piece, stop = choice.finder.add(piece)
            parts.append(piece)
            if stop is not None:
                surplus = len(update.token_ids) - index - 1
                if surplus:  # tokens that came with this one and are not wanted any more
                    del choice.token_ids[-surplus:], update.token_ids[-surplus:]
                    if update.logprobs:
                        del update.logprobs[index + 1 :]
                break
        text = "".join(parts)
        if text:
            choice.pieces.append(text)
        return text, stop

    def _decode_piece(self, choice: _Choice) -> None:
        """The text of the tokens that have none yet; none of them has ended the request."""
        choice.pieces.append(choice.detokenizer.add_all(choice.token_ids[choice.decoded :]))
        choice.decoded = len(choice.token_ids)
        choice.decode_at = choice.decoded + DECODED_AT_ONCE

    def _shown(self, choice: _Choice) -> bool:
        """Whether the token that ended the request has its text in the output."""
        return choice.request.sampling.include_stop_str_in_output

    def _end(self, choice: _Choice, update: TokenUpdate, text: str, now: float) -> StreamOutput:
        """The last part of a choice; with the whole output when it was the last choice."""
        if choice.detokenizer is not None and not isinstance(update.stop_reason, str):
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
            self._new_scores(choice),
        )

    def _rest_of_text(self, choice: _Choice, update: TokenUpdate) -> str:
        """What the detokenizer and the finder still hold, and the tokens that have no text yet."""
        text = ""
        if not choice.eager:
            ids = choice.token_ids[choice.decoded :]
            if update.status is RequestStatus.FINISHED_STOPPED and not self._shown(choice):
                ids = ids[:-1]
            text = choice.detokenizer.add_all(ids)
        elif choice.finder is not None:
            text = choice.finder.flush()
        text += choice.detokenizer.finish()
        if text:
            choice.pieces.append(text)
        return text

    def _completion(self, choice: _Choice, update: TokenUpdate, now: float) -> CompletionOutput:
        arrival = choice.request.arrival_time
        first, count = choice.first_token_time, len(choice.token_ids)
        logprobs = choice.logprobs[:count] if choice.logprobs is not None else None
        return CompletionOutput(
            index=choice.request.choice,
            text="".join(choice.pieces),
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
            group.scores,
            group.pooled,
        )


def _is_over(choice: _Choice, text: str, now: float) -> bool:
    """Whether a timed choice, which `text` was added to, has come to its end."""
    choice.has_line = choice.has_line or "\n" in text
    limit, first = choice.line_seconds, choice.first_token_time
    return choice.has_line and limit is not None and first is not None and now - first >= limit
