"""NovaInfer: `LLM` and its parameter classes, imported on first use."""

from llaisys.common.version import __version__

TYPE_CHECKING = False  # not typing's: `python -m llaisys` sets a safe import path first
if TYPE_CHECKING:
    from llaisys.common.sampling import SamplingParams
    from llaisys.common.structured import StructuredOutputs
    from llaisys.engine.beam_search import BeamSearchParams
    from llaisys.entrypoints.llm import LLM
    from llaisys.models.families import register_family

__all__ = [
    "LLM",
    "BeamSearchParams",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
    "register_family",
]


def __getattr__(name: str) -> object:
    if name == "LLM":
        from llaisys.entrypoints.llm import LLM

        return LLM
    if name == "SamplingParams":
        from llaisys.common.sampling import SamplingParams

        return SamplingParams
    if name == "StructuredOutputs":
        from llaisys.common.structured import StructuredOutputs

        return StructuredOutputs
    if name == "BeamSearchParams":
        from llaisys.engine.beam_search import BeamSearchParams

        return BeamSearchParams
    if name == "register_family":
        from llaisys.models.families import register_family

        return register_family
    raise AttributeError(f"module 'llaisys' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
