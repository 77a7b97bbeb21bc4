"""Options that several commands have, and what becomes of them."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from llaisys.common.flags import OptionParser, add_flags, given_flags
from llaisys.common.model_argument import add_model_argument
from llaisys.common.options import options_of
from llaisys.common.progress import show_progress
from llaisys.common.sampling import SamplingParams
from llaisys.engine.config import add_engine_flags, given_engine_options

if TYPE_CHECKING:
    from llaisys.entrypoints.llm import LLM


SEED = ("seed",)  # of the engine: with sampling flags, their --seed is given to both


def add_model_options(
    parser: OptionParser, position: bool = True, without: tuple[str, ...] = ()
) -> None:
    """MODEL and the engine's options; `without`: those that mean something else here."""
    add_model_argument(parser, position=position)
    add_engine_flags(parser, without=without)


def open_llm(options: argparse.Namespace, **more: Any) -> LLM:
    from llaisys.entrypoints.llm import LLM

    with show_progress(sys.stderr):
        return LLM(options.model, **given_engine_options(options) | more)


def add_sampling_options(parser: OptionParser) -> None:
    group = parser.add_argument_group("sampling (defaults come with the model)")
    add_flags(parser, group, list(options_of(SamplingParams)))


def sampling_of(options: argparse.Namespace, **given: Any) -> SamplingParams:
    """The command line's values, under those of a job's own fields."""
    chosen = given_flags(options, SamplingParams) | given
    chosen.setdefault("max_tokens", 512)
    return SamplingParams.from_wire(chosen)
