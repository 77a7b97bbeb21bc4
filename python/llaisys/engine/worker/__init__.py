"""The worker: one rank's model, its step inputs and its sampling."""

from llaisys.engine.worker.worker import STAGES, Worker

__all__ = ["STAGES", "Worker"]
