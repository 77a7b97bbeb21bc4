"""The classifier of a reranker: the score of a pair of texts from a pooled hidden state."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llaisys.models.families.decoder_tensors import SCORE
from llaisys.models.loading.checkpoint import Checkpoint


class ScoreHead:
    """output(tanh(dense(state))) in f32, through a sigmoid unless `is_raw`."""

    def __init__(self, checkpoint: Checkpoint, is_raw: bool) -> None:
        def read(name: str) -> NDArray[np.float32]:
            return checkpoint.read(f"{SCORE}{name}", "f32")

        self._dense, self._dense_bias = read("dense.weight"), read("dense.bias")
        self._output, self._output_bias = read("output.weight"), read("output.bias")
        self._is_raw = is_raw

    def __call__(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        """[1] of a state [hidden_size]."""
        inner = np.tanh(self._dense @ state + self._dense_bias)
        logit = self._output @ inner + self._output_bias
        if self._is_raw:
            return logit.astype(np.float32)
        return (0.5 * (1.0 + np.tanh(0.5 * logit))).astype(np.float32)
