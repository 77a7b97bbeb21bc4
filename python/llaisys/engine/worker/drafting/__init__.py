"""What guesses tokens beside the model: a model or a head, with a KV cache of its own."""

from llaisys.engine.worker.drafting.drafter import Drafter
from llaisys.engine.worker.drafting.loading import load_drafter

__all__ = ["Drafter", "load_drafter"]
