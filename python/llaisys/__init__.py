"""NovaInfer: `LLM` and its parameter classes, imported on first use."""

from llaisys.common.version import __version__

TYPE_CHECKING = False  # not typing's: `python -m llaisys` sets a safe import path first
if TYPE_CHECKING:
    from llaisys.common.sampling import SamplingParams as SamplingParams
    from llaisys.common.structured import StructuredOutputs as StructuredOutputs
    from llaisys.engine.beam_search import BeamSearchParams as BeamSearchParams
    from llaisys.entrypoints.llm import LLM as LLM
    from llaisys.models.families import register_family as register_family

_MODULES = {
    "LLM": "llaisys.entrypoints.llm",
    "BeamSearchParams": "llaisys.engine.beam_search",
    "SamplingParams": "llaisys.common.sampling",
    "StructuredOutputs": "llaisys.common.structured",
    "register_family": "llaisys.models.families",
}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'llaisys' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
