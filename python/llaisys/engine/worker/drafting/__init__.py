"""What guesses tokens beside the model: a model of its own, with a KV cache of its own."""

from llaisys.engine.worker.drafting.draft_model import DraftModel, load_draft_model

__all__ = ["DraftModel", "load_draft_model"]
