"""The worker: one rank's model, its step inputs and its sampling."""

from llaisys.engine.worker.timers import STAGES
from llaisys.engine.worker.worker import Worker

__all__ = ["STAGES", "Worker"]
