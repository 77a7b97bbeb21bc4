"""The engine's configuration: frozen, validated once, and the one place where an option is written.

What a field says about itself becomes the check, the keyword of `LLM`, the flag of every command,
and the form in which the engine process gets it. `EngineConfig.of` takes the options of all
sections by their names.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llaisys.common.flags import OptionParser, add_flags, given_flags
from llaisys.common.nearest import unknown_name
from llaisys.common.option_names import Row, spellings, with_field_names
from llaisys.common.options import (
    Bytes,
    Choice,
    Integer,
    Number,
    Option,
    Record,
    Switch,
    Text,
    TextOrFile,
    Toggle,
    changed,
    check_options,
    option,
    options_of,
    rebuilt,
)
from llaisys.common.parallel import ParallelConfig, normalize_parallel_config
from llaisys.common.sampling import POOLINGS
from llaisys.common.validation import invalid_value

__all__ = [
    "CacheConfig",
    "EngineConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "normalize_parallel_config",
]

DTYPES = ("auto", "f32", "f16", "bf16")
QUANTIZATIONS = ("int8", "int4")
DTYPE_NAMES = {
    "float32": "f32",
    "float": "f32",
    "float16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
}
KV_DTYPES = (*DTYPES, "q8")  # q8: on the CPU alone, see EngineConfig
KV_DTYPE_NAMES = {**DTYPE_NAMES, "int8": "q8"}
MAX_BYTES = 1 << 62
# Running sequences from which on there are no drafts by default. On a CPU a row costs what it
# computes from few rows on, so a draft of a model or a head costs what a token does.
DRAFT_BATCH, CPU_DRAFT_BATCH = 32, 4
MAX_TEMPLATE_CHARS = 64 << 10  # as `tokenization.chat_template` takes


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may hold."""

    max_num_seqs: int = option(256, Integer(1, 65536), "sequences that run at once")
    max_num_batched_tokens: int = option(
        2048, Integer(1), "tokens of a step, prompts and decoding together"
    )
    min_prefill_chunk: int = option(
        64, Integer(1), "smallest piece that sharing cuts a long prompt into"
    )
    max_scored_tokens: int = option(
        128, Integer(1), "prompt tokens of a step whose logprobs are wanted: each takes its logits"
    )
    context_shift: bool = option(
        False, Switch(), "go on when the context is full: drop the older half of it (see n_keep)"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise invalid_value(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs, {self.max_num_seqs}, so that every running request can "
                "go on",
            )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache: one pool of blocks."""

    block_size: int = option(16, Integer(1, 1024), "token slots per block of the KV cache")
    kv_cache_memory: int | None = option(
        None, Integer(1, MAX_BYTES), "bytes for the KV cache; else a modest size is picked"
    )
    gpu_memory_utilization: float = option(
        0.9, Number(0, 1, above_low=True), "share of a GPU's memory that the engine may use"
    )
    num_kv_blocks: int | None = option(
        None, Integer(1), "blocks of the KV cache; overrides the bytes"
    )
    enable_prefix_caching: bool = option(
        True,
        Switch(),
        "reuse the KV cache of equal prompt prefixes",
        aliases=("prefix_caching",),
    )
    prefix_cache_min_match: int = option(0, Integer(0), "tokens; a shorter match is not used")
    kv_offload: int = option(
        0,
        Bytes(0, MAX_BYTES),
        "bytes of CPU memory for prefix blocks that the KV cache evicts, e.g. 4GiB; 0: none",
    )
    kv_cache_dtype: str = option(
        "auto",
        Choice(KV_DTYPES, KV_DTYPE_NAMES),
        "of keys and values; auto: the model's dtype; q8: 8 bits, half the memory (CPU)",
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding, with the names of vLLM. See docs/guides/speculative_decoding.md."""

    method: str = option(
        "ngram",
        Choice(("ngram", "draft_model", "eagle", "mtp"), {"eagle3": "eagle"}),
        "ngram: from the request's own tokens; draft_model: from a smaller model; eagle, mtp: from "
        "a head over the model's hidden states",
    )
    model: str | None = option(
        None,
        Text(),
        "that drafts: directory, GGUF file or hub name; of a head: else the model's own MTP layer, "
        "or the head that comes with the package for this model",
    )
    num_speculative_tokens: int = option(8, Integer(1, 64), "drafts of a request and step at most")
    prompt_lookup_max: int = option(4, Integer(1, 64), "tokens in common beyond which none count")
    prompt_lookup_min: int = option(2, Integer(1, 64), "tokens in common that a draft needs")
    disable_by_batch_size: int = option(
        0,
        Integer(0, 65536),
        f"running sequences from which on there are no drafts; 0: {DRAFT_BATCH}, and "
        f"{CPU_DRAFT_BATCH} where a model or a head drafts on a CPU",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise invalid_value(
                "prompt_lookup_min",
                self.prompt_lookup_min,
                f"at most prompt_lookup_max, {self.prompt_lookup_max}",
            )
        if self.method == "draft_model" and self.model is None:
            raise invalid_value("model", None, f"the model that drafts, for method {self.method!r}")
        if not self.has_weights and self.model is not None:
            raise invalid_value("model", self.model, f"left out for method {self.method!r}")

    @property
    def has_weights(self) -> bool:
        """Drafts come from weights of their own."""
        return self.method != "ngram"

    @property
    def is_head(self) -> bool:
        """They are a head over the model's hidden states."""
        return self.method in ("eagle", "mtp")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that an engine is built from."""

    model: str | None = option(
        None, Text(), "directory, GGUF file or hub name; else the default model", flag=None
    )
    model_type: str | None = option(
        None, Text(), "model family; else what the model's config says", flag=None
    )
    tokenizer: Any = None  # a Tokenizer to use instead of the model's own
    adapter_class: Any = None  # a ModelAdapter class to use instead of the registry's
    device: str = option("cpu", Text(), "what computes: cpu or cuda")
    dtype: str = option(
        "auto", Choice(DTYPES, DTYPE_NAMES), "auto (the model's own), f32, f16 or bf16"
    )
    quantization: str | None = option(
        None, Choice(QUANTIZATIONS), "int8 or int4: makes plain weights smaller at load (CPU)"
    )
    max_model_len: int | None = option(
        None, Integer(2), "longest prompt and answer, in tokens; else the model's own limit"
    )
    n_threads: int = option(0, Integer(0, 4096), "CPU threads; 0: one per core", flag="--threads")
    seed: int | None = option(
        None, Integer(0, (1 << 64) - 1), "makes requests without a seed of their own repeatable"
    )
    step_timeout: float | None = option(
        None, Number(0, above_low=True), "seconds that a step may take; else as long as it takes"
    )
    async_scheduling: str = option(
        "auto",
        Toggle(),
        "schedule the next step while one is in flight; auto: where it is faster",
        deprecated=("async_stepping",),
    )
    exact: bool = option(
        False,
        Switch(),
        "on a GPU: what a request gets does not depend on the others; slower. A CPU is always so",
    )
    warmup: bool = option(True, Switch(), "no step before the first request")
    chat_template: str | None = option(
        None,
        TextOrFile("{", MAX_TEMPLATE_CHARS, "a Jinja template"),
        "how chats become prompts: a Jinja file, or its text; else as the model says",
    )
    pooling: str = option(
        "last", Choice(POOLINGS), "what an embedding is of: the last token, or the mean of all"
    )
    speculative_config: dict[str, Any] | None = option(
        None, Record(SpeculativeConfig), 'drafts as JSON, e.g. {"method": "ngram"}'
    )
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "parallel", normalize_parallel_config(self.parallel))
        if self.cache.kv_cache_dtype == "q8" and self.device != "cpu":
            limit = f"{', '.join(DTYPES)} on device {self.device}: 8 bits are for the CPU"
            raise invalid_value("kv_cache_dtype", "q8", limit)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """`speculative_config` with its defaults; None: no drafts."""
        given = self.speculative_config
        if given is None:
            return None
        config = SpeculativeConfig(**given)
        few = config.has_weights and self.device == "cpu"
        batch = config.disable_by_batch_size or (CPU_DRAFT_BATCH if few else DRAFT_BATCH)
        return replace(config, disable_by_batch_size=batch)

    @classmethod
    def of(cls, **values: Any) -> EngineConfig:
        """From the options of all sections by their names; an unknown one is a TypeError."""
        values = with_field_names(values, engine_rows())
        own = {name: values.pop(name) for name in _OBJECTS if name in values}
        parts: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
        for section, name, _, _ in engine_options():
            if name in values:
                (own if section is None else parts[section])[name] = values.pop(name)
        if values:
            raise TypeError(
                unknown_name("engine option", next(iter(values)), spellings(engine_rows()))
            )
        made = {name: _SECTIONS[name](**given) for name, given in parts.items()}
        return cls(**own, **made)

    def to_wire(self) -> dict[str, Any]:
        """Plain data for another process; objects (tokenizer, adapter) stay at home."""
        return changed(self) | {name: changed(getattr(self, name)) for name in _SECTIONS}

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Everything is checked again; raises InvalidInputError."""
        parts = {name: rebuilt(kind, values.get(name, {})) for name, kind in _SECTIONS.items()}
        own = {name: value for name, value in values.items() if name not in _SECTIONS}
        config: EngineConfig = rebuilt(cls, own, **parts)
        return config


_OBJECTS = ("tokenizer", "adapter_class")
_SECTIONS: dict[str, type[Any]] = {
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "parallel": ParallelConfig,
}


def engine_options() -> Iterator[tuple[str | None, str, Option, Any]]:
    """(section or None, name, description, default) of every option, the engine's own first."""
    owners: list[tuple[str | None, type[Any]]] = [(None, EngineConfig), *_SECTIONS.items()]
    for section, owner in owners:
        for name, about, default in options_of(owner):
            yield section, name, about, default


def engine_rows() -> list[Row]:
    """(name, description, default) of every option."""
    return [(name, about, default) for _, name, about, default in engine_options()]


def engine_parameters() -> list[inspect.Parameter]:
    """Every option but the model as a keyword parameter, for the signature of `LLM`."""
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for _, name, _, default in engine_options()
        if name != "model"
    ] + [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in _OBJECTS]


def add_engine_flags(parser: OptionParser, *, without: tuple[str, ...] = ()) -> None:
    """A flag for every engine option; `without`: those that mean something else here."""
    group = parser.add_argument_group("engine")
    add_flags(parser, group, [row for row in engine_rows() if row[0] not in without])


def given_engine_options(
    options: Any, *, only: tuple[str, ...] = (), because: str = ""
) -> dict[str, Any]:
    """What was given on the command line, for `EngineConfig.of` or `LLM`; the model is apart.
    `only`: any other is refused by its name, `because` saying why."""
    owners = (EngineConfig, *_SECTIONS.values())
    given = {name: v for owner in owners for name, v in given_flags(options, owner).items()}
    given.pop("model", None)
    for name, value in given.items():
        if only and name not in only:
            raise invalid_value(name, value, f"left out: {because}")
    return given
