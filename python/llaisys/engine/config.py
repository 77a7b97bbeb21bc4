"""The engine's configuration: frozen, validated once, and the declaration of every engine option.

A field's description gives the check, the keyword of `LLM`, the flag of every command, the key of
the configuration file and the wire form. `EngineConfig.of` takes the options of all sections by
name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from llaisys.common.foreign_names import unknown_option
from llaisys.common.lora import LoraModule, LoraModules
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
    "LoraConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "normalize_parallel_config",
]

DTYPES = ("auto", "f32", "f16", "bf16")
QUANTIZATIONS = ("int8", "int4", "fp8")
DTYPE_NAMES = {
    "float32": "f32",
    "float": "f32",
    "float16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
}
KV_DTYPES = (*DTYPES, "q8", "fp8")  # fp8: on CUDA alone, see EngineConfig
KV_DTYPE_NAMES = {**DTYPE_NAMES, "int8": "q8", "fp8_e4m3": "fp8"}
MAX_BYTES = 1 << 62
# Running sequences from which on there are no drafts by default. On a CPU a row costs what it
# computes from few rows on, so a draft of a model or a head costs what a token does.
DRAFT_BATCH, CPU_DRAFT_BATCH = 32, 4
DEFAULT_MAX_LORAS, DEFAULT_LORA_RANK = 8, 16
MAX_TEMPLATE_CHARS = 64 << 10  # as `tokenization.chat_template` takes
CPU_TOKEN_BUDGET = 2048


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step may hold."""

    max_num_seqs: int = option(
        256, Integer(1, 65536), "Maximum running sequences",
        group="scheduling", common=True, aliases=("parallel", "-np"),
    )  # fmt: skip
    max_num_batched_tokens: int | None = option(
        None, Integer(1), "Token budget of a step",
        group="scheduling", common=True,
        default_text="2048 on a CPU, 4096 on a GPU",
    )  # fmt: skip
    min_prefill_chunk: int = option(
        64, Integer(1), "Smallest chunk of a chunked prefill, in tokens", group="scheduling"
    )
    max_prompt_logprob_tokens: int = option(
        128, Integer(1), "Prompt tokens with logprobs per step",
        group="scheduling",
        more="Each of them needs a row of logits.",
    )  # fmt: skip
    context_shift: bool = option(
        False, Switch(), "Shift the context when it is full",
        group="scheduling", common=True,
        more="Discards the older half of the context after the first `n_keep` tokens.",
    )  # fmt: skip
    max_step_time: float | None = option(
        None, Number(0), "Target time of a step while a stream runs",
        group="scheduling", metavar="SECONDS",
        default_text="0.25 in a server, none offline",
        more="Prefill chunks shrink to it, at the measured speed. With more streams it is shorter, "
        "down to 1.75 steps without prefill, with more waiting prompts longer. 0: no target.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        if self.token_budget < self.max_num_seqs:
            raise invalid_value(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs, {self.max_num_seqs}, so that every running request can "
                "go on",
            )

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens`, or its default on a CPU; `resolve_device` sets a GPU's."""
        return self.max_num_batched_tokens or max(CPU_TOKEN_BUDGET, self.max_num_seqs)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache: one pool of blocks."""

    block_size: int = option(16, Integer(1, 1024), "KV cache block size, in tokens", group="device")
    kv_cache_memory_bytes: int | None = option(
        None, Bytes(1, MAX_BYTES), "KV cache size, e.g. 4GiB",
        group="device", common=True, default_text="automatic", aliases=("kv_cache_memory",),
        more="Automatic: what `gpu_memory_utilization` leaves on a GPU, a modest size on a CPU.",
    )  # fmt: skip
    gpu_memory_utilization: float = option(
        0.9, Number(0, 1, above_low=True), "Fraction of GPU memory to use",
        group="device", common=True, metavar="FRACTION",
    )  # fmt: skip
    num_kv_blocks: int | None = option(
        None, Integer(1), "KV cache size in blocks", group="device", default_text="automatic",
        aliases=("num_gpu_blocks_override",), more="Overrides `kv_cache_memory_bytes`.",
    )  # fmt: skip
    enable_prefix_caching: bool = option(
        True, Switch(), "Reuse the KV cache of shared prompt prefixes",
        group="scheduling", common=True, aliases=("prefix_caching",),
    )  # fmt: skip
    prefix_cache_min_match: int = option(
        0, Integer(0), "Shortest prefix match to reuse, in tokens", group="scheduling"
    )
    kv_offload: int = option(
        0, Bytes(0, MAX_BYTES), "CPU memory for evicted KV blocks, e.g. 4GiB",
        group="device", common=True, default_text="off",
        more="With `kv_transfer` the default is the size of the KV cache, at most an eighth of the "
        "available memory.",
    )  # fmt: skip
    kv_transfer: str = option(
        "off", Choice(("off", "shm", "tcp")), "Transport of KV blocks between engines",
        group="parallel", default_text="off; shm with prefill_replicas, tcp on Ray",
        more="`shm`: memory that engines of one machine share; `tcp`: a connection, also between "
        "machines. The blocks are in the memory of `kv_offload`.",
    )  # fmt: skip
    kv_cache_dtype: str = option(
        "auto", Choice(KV_DTYPES, KV_DTYPE_NAMES), "KV cache type",
        group="device", common=True, metavar="TYPE",
        more="`auto`: the data type of the model. `q8` (`int8`) and `fp8` (`fp8_e4m3`, CUDA only):"
        " 8 bits and a scale per token and head, about half the memory.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding, with the names of vLLM. See docs/guides/speculative_decoding.md."""

    method: str = option(
        "ngram",
        Choice(("ngram", "draft_model", "eagle", "mtp"), {"eagle3": "eagle"}),
        "Source of draft tokens",
        more="`ngram`: the tokens of the request; `draft_model`: a smaller model; `eagle`, `mtp`: "
        "a head that reads the hidden states of the target model.",
    )
    model: str | None = option(
        None, Text(), "Draft model or draft head: directory, GGUF file or hub id",
        default_text="for a head: the model's own MTP layer",
    )  # fmt: skip
    num_speculative_tokens: int = option(
        8, Integer(1, 64), "Maximum draft tokens per request and step"
    )
    prompt_lookup_max: int = option(4, Integer(1, 64), "Longest n-gram to match")
    prompt_lookup_min: int = option(2, Integer(1, 64), "Shortest n-gram to match")
    disable_by_batch_size: int = option(
        0, Integer(0, 65536), "Running sequences from which speculation is disabled",
        default_text=f"{DRAFT_BATCH}; {CPU_DRAFT_BATCH} for a draft model or head on a CPU",
    )  # fmt: skip

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
class LoraConfig:
    """LoRA adapters, with the names of vLLM. See docs/guides/lora.md."""

    enable_lora: bool = option(
        False, Switch(), "Support LoRA adapters", group="lora",
        more="On with `lora_modules`; needed to load adapters at run time only.",
    )  # fmt: skip
    lora_modules: tuple[LoraModule, ...] = option(
        (), LoraModules(), "LoRA adapters, each a model name of the API",
        group="model", common=True,
        more="A PEFT directory, a GGUF adapter or a hub id.",
    )  # fmt: skip
    max_loras: int | None = option(
        None, Integer(1, 1024), "Different LoRA adapters in a step", group="lora",
        default_text="as lora_modules, 1 to 8",
        more="Each has a slot of `max_lora_rank` in device memory.",
    )  # fmt: skip
    max_lora_rank: int | None = option(
        None, Integer(1, 256), "Largest rank of a LoRA adapter", group="lora",
        default_text="as lora_modules, at least 16",
    )  # fmt: skip
    max_cpu_loras: int | None = option(
        None, Integer(1, 65536), "LoRA adapters in CPU memory", group="lora",
        default_text="as lora_modules, at least max_loras",
        more="The least recently used ones beyond are read from their files again when needed.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.num_slots:
            raise invalid_value(
                "max_cpu_loras", self.max_cpu_loras, f"at least max_loras, {self.num_slots}"
            )

    @property
    def is_enabled(self) -> bool:
        return self.enable_lora or bool(self.lora_modules)

    @property
    def num_slots(self) -> int:
        """Device slots; 0: adapters are off."""
        if not self.is_enabled:
            return 0
        return self.max_loras or max(1, min(DEFAULT_MAX_LORAS, len(self.lora_modules)))

    @property
    def num_host(self) -> int:
        """Adapters in host memory."""
        return self.max_cpu_loras or max(self.num_slots, len(self.lora_modules))

    def max_rank(self, largest: int) -> int:
        """The largest rank of a slot; `largest`: of the `lora_modules`."""
        return self.max_lora_rank or max(DEFAULT_LORA_RANK, largest)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that an engine is built from."""

    model: str | None = option(
        None, Text(), "Directory, GGUF file, hub id or pypi:NAME",
        flag=None, group="model", default_text="a small model",
    )  # fmt: skip
    model_type: str | None = option(
        None,
        Text(),
        "Model family",
        flag=None,
        group="model",
        default_text="from the model's config",
    )
    revision: str | None = option(
        None, Text(), "Branch, tag or commit of a hub repository",
        group="model", default_text="main",
    )  # fmt: skip
    tokenizer: Any = None  # a Tokenizer that replaces the model's
    adapter_class: Any = None  # a ModelAdapter class that replaces the registry's
    device: str = option(
        "auto", Choice(("auto", "cpu", "cuda"), {"nvidia": "cuda"}), "Device",
        group="device", common=True,
        more="`auto`: CUDA if the package, the driver, the GPU and the other options support it, "
        "else the CPU. The log says which and why.",
    )  # fmt: skip
    dtype: str = option(
        "auto", Choice(DTYPES, DTYPE_NAMES), "Data type of weights and activations",
        group="model", common=True,
    )  # fmt: skip
    quantization: str | None = option(
        None, Choice(QUANTIZATIONS), "Quantize weights at load",
        group="model", common=True, aliases=("-q",),
        more="fp8: CUDA only. The embedding and the output matrix are int8 in every case.",
    )  # fmt: skip
    max_model_len: int | None = option(
        None, Integer(2), "Context length, in tokens",
        group="model", common=True, default_text="from model", aliases=("ctx_size", "-c"),
    )  # fmt: skip
    n_threads: int = option(
        0, Integer(0, 4096), "CPU threads", flag="--threads",
        group="device", common=True, default_text="one per usable core", aliases=("-t",),
        more="Usable: within the CPU affinity and the CPU quota of the container. Ranks and "
        "replicas divide them.",
    )  # fmt: skip
    seed: int | None = option(
        None, Integer(0, (1 << 64) - 1), "Seed for requests that set none",
        group="sampling", default_text="random",
    )  # fmt: skip
    generation_config: str = option(
        "auto", Text(), "Sampling defaults: auto, none, or a directory", group="sampling",
        metavar="auto|none|DIR",
        more="`auto`: those of the model's files, or those that its publisher recommends; `none` "
        "(also `vllm`): temperature 1 without truncation; a directory: its generation_config.json.",
    )  # fmt: skip
    step_timeout: float | None = option(
        None, Number(0, above_low=True), "Time limit of a step",
        group="scheduling", metavar="SECONDS",
    )  # fmt: skip
    async_scheduling: str = option(
        "auto", Toggle(), "Schedule the next step while one is in flight",
        group="scheduling", more="`auto`: on CUDA devices.",
    )  # fmt: skip
    exact: bool = option(
        False, Switch(), "Batch-invariant results",
        group="scheduling", common=True, aliases=("batch_invariant",),
        more="For GPUs, at a lower speed. Results on a CPU are always batch-invariant.",
    )  # fmt: skip
    warmup: bool = option(
        True, Switch(), "Run a warm-up step before the first request", group="scheduling"
    )
    chat_template: str | None = option(
        None, TextOrFile("{", MAX_TEMPLATE_CHARS, "a Jinja template"), "Jinja chat template",
        group="model", common=True, default_text="from model", more="A file, or the text itself.",
        aliases=("chat_template_file",),
    )  # fmt: skip
    pooling: str = option(
        "auto", Choice(("auto", *POOLINGS)), "Pooling method", group="model",
        more="For embeddings: the hidden state of the last or first (`cls`) token, or the mean of "
        "all tokens. auto: that of the model's sentence-transformers files, otherwise cls for "
        "encoders and last for decoders.",
    )  # fmt: skip
    speculative_config: dict[str, Any] | None = option(
        None, Record(SpeculativeConfig), 'Speculative decoding, e.g. {"method": "ngram"}',
        group="scheduling", common=True, aliases=("-sc",),
    )  # fmt: skip
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "parallel", normalize_parallel_config(self.parallel))
        stages = self.parallel.pipeline_parallel_size
        for name, is_set in (
            ("speculative_config", self.speculative_config is not None),
            ("enable_lora", self.lora.is_enabled),
        ):
            if stages > 1 and is_set:
                raise invalid_value(name, "on", f"off with pipeline_parallel_size {stages}")
        backend = self.parallel.distributed_executor_backend
        if self.cache.kv_transfer != "off" and backend != "uni":
            raise invalid_value("distributed_executor_backend", backend, "uni with kv_transfer")
        if self.cache.kv_cache_dtype == "fp8" and self.device == "cpu":
            limit = f"{', '.join(DTYPES)} or q8 on device cpu"
            raise invalid_value("kv_cache_dtype", "fp8", limit)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """`speculative_config` with its defaults; None: no drafts."""
        given = self.speculative_config
        if given is None:
            return None
        config = SpeculativeConfig(**given)
        few = config.has_weights and self.device != "cuda"
        batch = config.disable_by_batch_size or (CPU_DRAFT_BATCH if few else DRAFT_BATCH)
        return replace(config, disable_by_batch_size=batch)

    @classmethod
    def of(cls, **values: Any) -> Self:
        """From the options of all sections by their names; an unknown one is a TypeError."""
        values = with_field_names(values, engine_rows())
        own = {name: values.pop(name) for name in OBJECTS if name in values}
        parts: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        for section, name, _, _ in engine_options():
            if name in values:
                (own if section is None else parts[section])[name] = values.pop(name)
        if values:
            raise TypeError(
                unknown_option(next(iter(values)), spellings(engine_rows()), "engine option")
            )
        made = {name: SECTIONS[name](**given) for name, given in parts.items()}
        return cls(**own, **made)

    def to_wire(self) -> dict[str, Any]:
        """Plain data for another process; objects (tokenizer, adapter) stay at home."""
        return changed(self) | {name: changed(getattr(self, name)) for name in SECTIONS}

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> Self:
        """Everything is checked again; raises InvalidInputError."""
        parts = {name: rebuilt(kind, values.get(name, {})) for name, kind in SECTIONS.items()}
        own = {name: value for name, value in values.items() if name not in SECTIONS}
        return rebuilt(cls, own, **parts)


OBJECTS = ("tokenizer", "adapter_class")  # fields of EngineConfig that are no options
SECTIONS: dict[str, type[Any]] = {
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "parallel": ParallelConfig,
    "lora": LoraConfig,
}


def engine_options() -> Iterator[tuple[str | None, str, Option, Any]]:
    """(section or None, name, description, default) of every option, the engine's own first."""
    owners: list[tuple[str | None, type[Any]]] = [(None, EngineConfig), *SECTIONS.items()]
    for section, owner in owners:
        for name, about, default in options_of(owner):
            yield section, name, about, default


def engine_rows() -> list[Row]:
    """(name, description, default) of every option, in the order of help."""
    found = list(engine_options())
    found.sort(key=lambda item: item[0] is None and item[2].group == "scheduling")
    return [(name, about, default) for _, name, about, default in found]
