"""Draft models and draft heads, with their own KV caches."""

from llaisys.engine.worker.drafting.drafter import Drafter
from llaisys.engine.worker.drafting.loading import load_drafter

__all__ = ["Drafter", "load_drafter"]
