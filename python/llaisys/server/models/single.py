"""A server with one model, loaded at start; the server ends when its engine dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llaisys.server.service import Service


def nothing() -> None:
    pass


class SingleModel:
    """The interface of `ModelManager` for one model."""

    has_several = False

    def __init__(self, service: Service) -> None:
        self.first = service

    def has_model(self, name: str) -> bool:
        return self.first.has_model(name)

    @property
    def services(self) -> list[Service]:
        return [self.first]

    async def close(self) -> None:
        await self.first.engine.close()

    async def lease(self, name: str | None) -> tuple[Service, Callable[[], None]]:
        self.first.check_model(name)
        return self.first, nothing

    def cards(self) -> list[dict[str, Any]]:
        """Return a model object for every served name."""
        return [self.card(name) for name in self.first.all_names]

    def card(self, name: str) -> dict[str, Any]:
        service = self.first
        _ = service.engine.inputs  # ready, or raises
        return {**service.model_card(service.check_model(name)), "state": "ready"}
