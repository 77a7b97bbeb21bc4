"""Options that several commands share."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llaisys.common.flags import OptionParser, add_flags, add_model_argument, given_flags
from llaisys.common.lora import LoraModule, LoraModules
from llaisys.common.options import options_of
from llaisys.common.progress import show_progress
from llaisys.common.sampling import SamplingParams
from llaisys.engine.engine_flags import add_engine_flags, given_engine_options

if TYPE_CHECKING:
    from llaisys.entrypoints.llm import LLM


# The engine options of benchmarks without an engine; the others are rejected.
MODEL_OPTIONS = ("revision", "dtype", "quantization", "kv_cache_dtype", "n_threads")
LATENCY_OPTIONS = (*MODEL_OPTIONS, "device", "exact", "max_model_len")
PERPLEXITY_OPTIONS = (*MODEL_OPTIONS, "device")
OPS_OPTIONS = ("device", "n_threads")
SEED = ("seed",)  # an engine option that the sampling option of the same name replaces
MAX_TOKENS = 512  # of a request on the command line


def add_model_options(
    parser: OptionParser, position: bool = True, without: tuple[str, ...] = ()
) -> None:
    """Add MODEL and the engine's options but `without`."""
    add_model_argument(parser, position=position)
    add_engine_flags(parser, without=without)


def add_lora_option(parser: OptionParser) -> None:
    parser.named_group("model").add_argument(
        "--lora", metavar="PATH", help="LoRA adapter: a path, hub id or name of --lora-modules"
    )


def open_llm(options: argparse.Namespace, **more: Any) -> LLM:
    """Open the model. A `--lora` that is no name of `--lora-modules` is loaded as "lora", which
    replaces it in `options`."""
    from llaisys.entrypoints.llm import LLM

    lora = getattr(options, "lora", None)
    if lora is not None:
        modules = LoraModules().check("lora_modules", options.lora_modules or ())
        if lora not in [module.name for module in modules]:
            options.lora = "lora"
            modules = (*modules, LoraModule("lora", lora))
        more["lora_modules"] = modules
    with show_progress(sys.stderr):
        return LLM(options.model, **given_engine_options(options) | more)


def add_sampling_options(parser: OptionParser) -> None:
    rows = [
        (name, replace(about, default_text=str(MAX_TOKENS)), default)
        if name == "max_tokens"
        else (name, about, default)
        for name, about, default in options_of(SamplingParams)
    ]
    add_flags(parser, rows)


def sampling_of(options: argparse.Namespace, **given: Any) -> SamplingParams:
    """The values of the command line; `given`, the fields of a job, override them."""
    chosen = given_flags(options, SamplingParams) | given
    chosen.setdefault("max_tokens", MAX_TOKENS)
    return SamplingParams.from_wire(chosen)
