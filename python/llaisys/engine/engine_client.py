"""What an entry point needs of an engine, wherever the engine runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from llaisys.common.sampling import SamplingParams
from llaisys.common.types import ModelInfo, StreamOutput
from llaisys.engine.config import EngineConfig
from llaisys.engine.input_processor import Messages
from llaisys.engine.llm_engine import LLMEngine


class EngineClient(ABC):
    """Submit, step, cancel; the contracts are those of `LLMEngine`."""

    model_info: ModelInfo
    tokenizer: Any  # None when the model has none

    @abstractmethod
    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        stream: bool = False,
        cache_salt: str | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> str: ...

    @abstractmethod
    def step(self) -> list[StreamOutput]: ...

    @abstractmethod
    def cancel(self, request_id: str) -> list[StreamOutput]: ...

    @abstractmethod
    def has_unfinished(self) -> bool: ...

    @abstractmethod
    def encode_chat(self, messages: Messages, **options: Any) -> list[int]: ...

    @abstractmethod
    def stats(self) -> dict[str, Any]: ...

    @abstractmethod
    def profile(self, reset: bool = False) -> dict[str, Any]: ...

    @abstractmethod
    def close(self) -> None: ...


class InProcessClient(EngineClient):
    """The engine in the caller's own process and thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = LLMEngine(config)
        self.model_info = self.engine.model_info
        self.tokenizer = self.engine.tokenizer

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        stream: bool = False,
        cache_salt: str | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> str:
        return self.engine.submit(prompt, params, request_id, stream, cache_salt, shown)

    def step(self) -> list[StreamOutput]:
        return self.engine.step()

    def cancel(self, request_id: str) -> list[StreamOutput]:
        return self.engine.cancel(request_id)

    def has_unfinished(self) -> bool:
        return self.engine.has_unfinished()

    def encode_chat(self, messages: Messages, **options: Any) -> list[int]:
        return self.engine.encode_chat(messages, **options)

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def profile(self, reset: bool = False) -> dict[str, Any]:
        return self.engine.profile(reset)

    def close(self) -> None:
        self.engine.close()
