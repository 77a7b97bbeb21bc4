"""The score of a pair of texts from a pooled hidden state of a reranker."""

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llaisys.common.errors import ModelLoadError
from llaisys.models.families.decoder_tensors import EMBEDDING, OUTPUT, SCORE
from llaisys.models.families.model_config import decoder_config
from llaisys.models.loading.checkpoint import Checkpoint
from llaisys.models.loading.shard import Shard
from llaisys.tokenization import Tokenizer

_JUDGE = "qwen3-reranker"  # in the path of the model or in the first lines of its README.md
_README_BYTES = 4096


class ScoreHead(Protocol):
    @property
    def is_judge(self) -> bool:
        """Whether the state is that of the last token of a `Tokenizer.judge_prompt`; otherwise of
        the first token of a `Tokenizer.join_pair`."""

    def __call__(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        """[1] of a state [hidden_size]."""


class ClassifierHead:
    """output(tanh(dense(state))) in f32, through a sigmoid unless `is_raw`."""

    is_judge = False

    def __init__(self, checkpoint: Checkpoint, is_raw: bool) -> None:
        def read(name: str) -> NDArray[np.float32]:
            return checkpoint.read(f"{SCORE}{name}", "f32")

        self._dense, self._dense_bias = read("dense.weight"), read("dense.bias")
        self._output, self._output_bias = read("output.weight"), read("output.bias")
        self._is_raw = is_raw

    def __call__(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        inner = np.tanh(self._dense @ state + self._dense_bias)
        logit = self._output @ inner + self._output_bias
        if self._is_raw:
            return logit.astype(np.float32)
        return _sigmoid(logit)


class JudgeHead:
    """The probability of the token "yes" against "no" (Qwen3-Reranker)."""

    is_judge = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        tokenizer = Tokenizer.from_source(checkpoint.tokenizer_source)
        ids = tokenizer.token_id("yes"), tokenizer.token_id("no")
        if None in ids:
            raise ModelLoadError(f"{checkpoint.where}: the vocabulary has no token 'yes' or 'no'")
        name = EMBEDDING if decoder_config(checkpoint).tie_word_embeddings else OUTPUT
        yes, no = (
            checkpoint.read_shard(name, "f32", Shard(0, i, i + 1)) for i in ids if i is not None
        )
        self._difference: NDArray[np.float32] = yes - no  # [1, hidden_size]

    def __call__(self, state: NDArray[np.float32]) -> NDArray[np.float32]:
        return _sigmoid(self._difference @ state)


def _sigmoid(logit: NDArray[np.float32]) -> NDArray[np.float32]:
    return (0.5 * (1.0 + np.tanh(0.5 * logit))).astype(np.float32)


def is_judge(checkpoint: Checkpoint) -> bool:
    """Whether a decoder is a Qwen3-Reranker, whose config is that of any Qwen3."""
    if decoder_config(checkpoint).model_type != "qwen3":
        return False
    path = Path(checkpoint.where)
    readme = path / "README.md"
    head = b""
    if path.is_dir() and readme.is_file():
        with readme.open("rb") as file:
            head = file.read(_README_BYTES)
    return _JUDGE in str(path).lower() or f"# {_JUDGE}".encode() in head.lower()
