"""Timings of an answer in the format of llama.cpp's server."""

import time
from collections.abc import Iterator
from typing import Any

from llaisys.common.types import CompletionOutput, PromptProgress


def timings_object(output: CompletionOutput, prompt_tokens: int) -> dict[str, Any]:
    """Return prompt time (from its first step, not its arrival) and generation time."""
    times, cached, count = output.timings, output.num_cached_tokens, len(output.token_ids)
    total = times.total or 0.0
    started = times.queue or 0.0
    first = times.first_token if times.first_token is not None else total
    computed = max(0, prompt_tokens - cached)
    return {
        "cache_n": cached,
        **rate_object("prompt", computed, 1e3 * max(0.0, first - started)),
        **predicted_object(count, 1e3 * max(0.0, total - first)),
    }


def predicted_object(count: int, milliseconds: float) -> dict[str, Any]:
    """Return the rates of generated tokens. The first one comes from the prompt's last step, so the
    rates are those of the others."""
    return {**rate_object("predicted", max(0, count - 1), milliseconds), "predicted_n": count}


def rate_object(name: str, count: int, milliseconds: float) -> dict[str, Any]:
    spent = round(milliseconds, 3)
    return {
        f"{name}_n": count,
        f"{name}_ms": spent,
        f"{name}_per_token_ms": spent / count if count else 0.0,
        f"{name}_per_second": 1e3 * count / spent if spent else 0.0,
    }


class StreamTimings:
    """Timings of a stream so far, for `timings_per_token`."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        self._started = self._first = time.monotonic()

    def add(self, num_tokens: int) -> None:
        if not self._tokens and num_tokens:
            self._first = time.monotonic()
        self._tokens += num_tokens

    def object(self) -> dict[str, Any]:
        """Return the timings; the prompt time includes the time in the queue."""
        prompt = rate_object("prompt", self._prompt_tokens, 1e3 * (self._first - self._started))
        seconds = time.monotonic() - self._first if self._tokens else 0.0
        return {**prompt, **predicted_object(self._tokens, 1e3 * seconds)}


def progress_timings(progress: dict[str, Any]) -> dict[str, Any]:
    """Return the timings at a prompt progress object, before the first token."""
    computed = progress["processed"] - progress["cache"]
    prompt = rate_object("prompt", computed, progress["time_ms"])
    return {"cache_n": progress["cache"], **prompt, **predicted_object(0, 0.0)}


class PromptProgressReporter:
    """Formats prompt progress for a stream: first the cached tokens, then increasing counts, all
    tokens with the first output token. A recomputed prompt reports no count twice."""

    def __init__(self, with_timings: bool = False) -> None:
        self._with_timings = with_timings
        self._reported = -1

    def fields(self, progress: PromptProgress | None) -> Iterator[dict[str, Any]]:
        """Yield the fields of each chunk that reports progress."""
        if progress is None:
            return
        steps = [(progress.done, progress.seconds)]
        if self._reported < 0:
            steps.insert(0, (progress.cached, 0.0))
        for done, seconds in steps:
            if done > self._reported:
                self._reported = done
                found = {
                    "total": progress.total,
                    "cache": progress.cached,
                    "processed": done,
                    "time_ms": round(1e3 * seconds, 3),
                }
                timings = {"timings": progress_timings(found)} if self._with_timings else {}
                yield {"prompt_progress": found, **timings}
