"""Base class of objects with `close()` that are also context managers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Self


class Closing:
    @abstractmethod
    def close(self) -> None:
        """Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
