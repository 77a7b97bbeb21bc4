"""Options that several commands have, and what becomes of them."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.model_argument import add_model_argument
from llaisys.common.progress import shown_on

if TYPE_CHECKING:
    from llaisys.common.sampling import SamplingParams
    from llaisys.entrypoints.llm import LLM

# Options of SamplingParams that the command line offers: name, type, help.
SAMPLING: tuple[tuple[str, Any, str], ...] = (
    ("max_tokens", int, "tokens to generate at most"),
    ("temperature", float, "0 takes the most likely token"),
    ("top_p", float, "smallest set of tokens with this probability"),
    ("top_k", int, "the k most likely tokens; 0: all"),
    ("min_p", float, "tokens at least this likely, relative to the best"),
    ("repetition_penalty", float, "above 1 discourages tokens seen before"),
    ("presence_penalty", float, "subtracted from tokens generated before"),
    ("frequency_penalty", float, "subtracted for each time a token was generated"),
    ("seed", int, "makes the answer repeatable"),
    ("n", int, "answers per prompt"),
)


def add_model_options(parser: argparse.ArgumentParser, position: bool = True) -> None:
    add_model_argument(parser, position=position)
    group = parser.add_argument_group("model")
    group.add_argument("--dtype", default="auto", help="auto, f32, f16 or bf16")
    group.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    group.add_argument("--max-model-len", type=int, help="longest prompt and answer, in tokens")
    group.add_argument("--kv-cache-memory", type=int, help="bytes for the KV cache")


def open_llm(options: argparse.Namespace, **more: Any) -> LLM:
    from llaisys.entrypoints.llm import LLM

    with shown_on(sys.stderr):
        return LLM(
            options.model,
            dtype=options.dtype,
            n_threads=options.threads,
            max_model_len=options.max_model_len,
            kv_cache_memory=options.kv_cache_memory,
            **more,
        )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (defaults come with the model)")
    for name, kind, text in SAMPLING:
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    group.add_argument("--stop", action="append", help="end before this text; may be repeated")


def sampling_of(options: argparse.Namespace, **given: Any) -> SamplingParams:
    from llaisys.common.sampling import SamplingParams

    names = [name for name, _, _ in SAMPLING] + ["stop"]
    values = {name: getattr(options, name) for name in names}
    chosen = {name: value for name, value in values.items() if value is not None} | given
    chosen.setdefault("max_tokens", 512)
    try:
        return SamplingParams(**chosen)
    except TypeError as error:
        raise InvalidInputError(f"unknown sampling field: {error}") from error
