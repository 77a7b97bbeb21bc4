"""Interface of an engine for the entry points, in process or remote."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from llaisys.common.sampling import SamplingParams
from llaisys.common.types import ModelInfo, StreamOutput
from llaisys.engine.input_processor import Messages


class EngineClient(ABC):
    """See `LLMEngine` for the contracts."""

    @property
    @abstractmethod
    def model_info(self) -> ModelInfo: ...

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """None when the model has none."""

    @abstractmethod
    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        stream: bool = False,
        cache_salt: str | None = None,
        visible_ids: frozenset[int] = frozenset(),
        lora: str | None = None,
    ) -> str: ...

    @abstractmethod
    def step(self) -> list[StreamOutput]: ...

    @abstractmethod
    def cancel(self, request_id: str) -> list[StreamOutput]: ...

    @property
    @abstractmethod
    def loras(self) -> tuple[str, ...]: ...

    @abstractmethod
    def load_lora(self, name: str, path: str, in_place: bool = False) -> None: ...

    @abstractmethod
    def unload_lora(self, name: str) -> None: ...

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
