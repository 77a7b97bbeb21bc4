"""Timings of an answer in the format of llama.cpp's server."""

from __future__ import annotations

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
        **rate_object("predicted", count, 1e3 * max(0.0, total - first)),
    }


def rate_object(name: str, count: int, milliseconds: float) -> dict[str, Any]:
    """Return count, time and rates."""
    return {
        f"{name}_n": count,
        f"{name}_ms": round(milliseconds, 3),
        f"{name}_per_token_ms": round(milliseconds / count, 3) if count else 0.0,
        f"{name}_per_second": round(1e3 * count / milliseconds, 3) if milliseconds else 0.0,
    }


class PromptProgressReporter:
    """Formats prompt progress for a stream: first the cached tokens, then increasing counts, all
    tokens with the first output token. A recomputed prompt reports no count twice."""

    def __init__(self) -> None:
        self._reported = -1

    def objects(self, progress: PromptProgress | None) -> list[dict[str, Any]]:
        if progress is None:
            return []
        steps = [(progress.done, progress.seconds)]
        if self._reported < 0:
            steps.insert(0, (progress.cached, 0.0))
        found = []
        for done, seconds in steps:
            if done > self._reported:
                self._reported = done
                found.append(
                    {
                        "total": progress.total,
                        "cache": progress.cached,
                        "processed": done,
                        "time_ms": round(1e3 * seconds, 3),
                    }
                )
        return found
