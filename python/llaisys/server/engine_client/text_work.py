"""CPU work on texts: tokenization, chat templates, long answers. Long work runs in thread pools."""

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from llaisys.server.thread_pool import BoundedThreadPool
from llaisys.tokenization.render_limits import OutOfBudget, cpu_budget

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger("llaisys.server")

# Shorter texts are tokenised on the event loop: a thread switch costs more.
INLINE_CHARS = 4096
INLINE_TEMPLATE_SECONDS = 0.02  # CPU time; usual templates take a tenth
TEXT_THREADS = 2
MAX_WAITING_TEXTS = 64
TEMPLATE_THREADS = 1  # slow templates and those with client variables, up to 0.5 s each
MAX_WAITING_TEMPLATES = 256  # benign ones take about 1 ms
ANSWER_THREADS = 2


class TextWork:
    """The thread pools of one model."""

    def __init__(self) -> None:
        self._texts = BoundedThreadPool("text", TEXT_THREADS, MAX_WAITING_TEXTS)
        self._templates = BoundedThreadPool("template", TEMPLATE_THREADS, MAX_WAITING_TEMPLATES)
        self._answers = BoundedThreadPool("answer", ANSWER_THREADS, 0)  # used with `finish` only
        self._has_slow_template = False

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work on `size` characters (or tokens): inline when short, else in the text pool.
        Raises ApiError 503 when that is full."""
        if size <= INLINE_CHARS:
            return work(*args, **kwargs)
        return await self._texts.run(work, *args, **kwargs)

    async def render(self, size: int, has_variables: bool, work: Callable[[], T]) -> T:
        """Like `run`, for work that renders the model's chat template. With client variables
        (`has_variables`) the size does not bound the time: such work always runs in the template
        pool. So does every call after one that exceeded INLINE_TEMPLATE_SECONDS inline."""
        if has_variables or self._has_slow_template:
            return await self._templates.run(work)
        if size > INLINE_CHARS:
            return await self._texts.run(work)
        try:
            with cpu_budget(INLINE_TEMPLATE_SECONDS):
                return work()
        except OutOfBudget:
            self._has_slow_template = True
            logger.warning("the model's chat template is slow; it is rendered in a thread")
        return await self._templates.run(work)

    async def write_answer(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work on a long answer in a thread; never rejected."""
        return await self._answers.finish(work, *args, **kwargs)

    def close(self) -> None:
        for pool in (self._texts, self._templates, self._answers):
            pool.close()
