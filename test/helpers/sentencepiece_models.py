"""Texts for tokenizers, and small SentencePiece models trained on them."""

from __future__ import annotations

import io
import random
from functools import cache
from typing import Any

import model_files
import sentencepiece

VOCAB = 2000
UNK, BOS, EOS = 0, 1, 2


def valid(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@cache
def texts(count: int, seed: int) -> tuple[str, ...]:
    """Mixed strings, and repetitions of few characters, in which many joins compete."""
    rng = random.Random(seed)
    result = [
        "",
        " ",
        "  ",
        "\u2581",
        " \u2581x",
        *map(valid, model_files.mixed_strings(count, seed)),
    ]
    for _ in range(count):
        parts = [rng.choice("ab =-\n你") * rng.randint(1, 9) for _ in range(rng.randint(1, 9))]
        result.append("".join(parts))
    return tuple(result)


def train(**options: Any) -> sentencepiece.SentencePieceProcessor:
    """A small BPE model with the settings of Llama 2."""
    sentences = [text.replace("\0", "") for text in texts(4000, seed=21)]
    model = io.BytesIO()
    settings = {
        "vocab_size": VOCAB,
        "byte_fallback": True,
        "character_coverage": 0.99,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "num_threads": 1,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        **{"model_type": "bpe", **settings, **options},
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
