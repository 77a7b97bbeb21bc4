"""Options that several commands have, and what becomes of them."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from llaisys.common.model_argument import add_model_argument
from llaisys.common.options import add_flags, given_flags, options_of
from llaisys.common.progress import shown_on
from llaisys.common.sampling import SamplingParams

if TYPE_CHECKING:
    from llaisys.entrypoints.llm import LLM


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
    add_flags(group, list(options_of(SamplingParams)))


def sampling_of(options: argparse.Namespace, **given: Any) -> SamplingParams:
    """The command line's values, under those of a job's own fields."""
    chosen = given_flags(options, SamplingParams) | given
    chosen.setdefault("max_tokens", 512)
    return SamplingParams.from_wire(chosen)
