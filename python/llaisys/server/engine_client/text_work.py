"""Work on texts, beside the event loop where it is long: tokenising, templates, long answers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from llaisys.server.thread_pool import BoundedThreadPool
from llaisys.tokenization.render_limits import OutOfBudget, cpu_budget

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("llaisys.server")

# Texts up to this length are tokenised on the event loop: a thread costs more than they do.
INLINE_CHARS = 4096
INLINE_TEMPLATE_SECONDS = 0.02  # of CPU; the usual templates take a tenth of that
TEXT_THREADS = 2
MAX_WAITING_TEXTS = 64
TEMPLATE_THREADS = 1  # templates with a client's variables and slow ones, each up to half a second
MAX_WAITING_TEMPLATES = 256  # all but those of an attack take a millisecond
ANSWER_THREADS = 2


class TextWork:
    """The thread pools of one model's texts."""

    def __init__(self) -> None:
        self._texts = BoundedThreadPool("text", TEXT_THREADS, MAX_WAITING_TEXTS)
        self._templates = BoundedThreadPool("template", TEMPLATE_THREADS, MAX_WAITING_TEMPLATES)
        self._answers = BoundedThreadPool("answer", ANSWER_THREADS, 0)  # finishes, refuses nobody
        self._has_slow_template = False

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of work on `size` characters (or tokens): at once when they are few, else in
        a thread for texts. Raises ApiError when too much waits for those."""
        if size <= INLINE_CHARS:
            return work(*args, **kwargs)
        return await self._texts.run(work, *args, **kwargs)

    async def render(self, size: int, unknown: bool, work: Callable[[], T]) -> T:
        """`run` for work that renders the model's chat template. No length says how long that takes
        where a client's variables go in (`unknown`): beside the loop, in a pool of its own. A
        template that is slow without them is begun on the loop once, for INLINE_TEMPLATE_SECONDS,
        and goes there from then on."""
        if unknown or self._has_slow_template:
            return await self._templates.run(work)
        if size > INLINE_CHARS:
            return await self._texts.run(work)
        try:
            with cpu_budget(INLINE_TEMPLATE_SECONDS):
                return work()
        except OutOfBudget:
            self._has_slow_template = True
            logger.warning("the model's chat template is slow: it is rendered in a thread")
        return await self._templates.run(work)

    async def write_answer(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of work on a long answer, in a thread; never refused."""
        return await self._answers.finish(work, *args, **kwargs)

    def close(self) -> None:
        for pool in (self._texts, self._templates, self._answers):
            pool.close()
