"""Objects with `close()`."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, Self


class Closing:
    """Base class of those that are also context managers."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Closable(Protocol):
    def close(self) -> None: ...


@contextmanager
def closed_on_error(owned: Closable | None) -> Iterator[None]:
    """Close an object if the block raises; otherwise it stays open."""
    try:
        yield
    except BaseException:
        if owned is not None:
            owned.close()
        raise
