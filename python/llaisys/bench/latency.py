"""`llaisys bench latency`: load, first token, prefill and decode times of one sequence."""

import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

from llaisys.common.machine_limits import resident_bytes
from llaisys.common.model_registry import get_adapter_class
from llaisys.common.progress import report
from llaisys.common.step import AttentionMetadata, ModelStepInput, SamplingMetadata
from llaisys.common.validation import check_int
from llaisys.engine.config import EngineConfig
from llaisys.engine.executor.device_choice import resolve_device
from llaisys.libllaisys.handles import Stream
from llaisys.models.base import AdapterOptions, ModelAdapter
from llaisys.models.decoder import weight_bytes
from llaisys.models.families import open_checkpoint
from llaisys.models.families.decoder_tensors import EMBEDDING
from llaisys.models.families.model_config import decoder_config
from llaisys.models.loading.checkpoint import Checkpoint
from llaisys.models.loading.local_models import cache_directory
from llaisys.models.loading.resolve import DEFAULT_MODEL, resolve_model
from llaisys.models.synthetic import write_shape_model

BLOCK = 16  # slots per KV block
FIRST_PROMPT = 16  # prompt tokens of the time-to-first-token measurement


def run_latency(
    engine: EngineConfig,
    shape: str | None = None,
    prompt_tokens: int = 512,
    new_tokens: int = 64,
    context: int = 128,
    repeats: int = 3,
) -> dict[str, Any]:
    """Only the model options of `engine` are used. `shape`: random weights of this shape instead of
    a model. `prompt_tokens`: of the prefill measurement. `context`: tokens before the first decoded
    one."""
    engine = resolve_device(engine)
    if shape is not None:
        path = shape_model_path(shape, engine.dtype)
    else:
        path = resolve_model(engine.model or DEFAULT_MODEL, revision=engine.revision)
    rng = np.random.default_rng(0)  # imported before base_rss is measured
    base_rss = resident_bytes()
    start = time.perf_counter()
    with open_checkpoint(path) as checkpoint:
        length = max(prompt_tokens, context + new_tokens) + 1
        adapter_options = _adapter_options(checkpoint, engine, length)
        family = get_adapter_class(checkpoint.config.model_type)
        adapter = family.load(checkpoint, adapter_options)
        load_s = time.perf_counter() - start
        read = read_bytes(checkpoint, adapter_options)
        weights = family.memory_needs(checkpoint, adapter_options, 1).weights
        kv_bytes = family.kv_bytes_per_token(checkpoint, adapter_options)
        kv_bytes *= adapter.kv_capacity_tokens
        dtype = engine.dtype if engine.dtype != "auto" else checkpoint.config.dtype
        kv_dtype = engine.cache.kv_cache_dtype
        kv_dtype = dtype if kv_dtype == "auto" else kv_dtype
    bandwidth = 0.0
    try:
        run = _Run(adapter, rng)
        run.prompt(FIRST_PROMPT)
        ttft_s = time.perf_counter() - start
        rss = resident_bytes()
        report("measuring prefill")
        prefill = min(run.prompt(prompt_tokens) for _ in range(repeats))
        report("measuring decode")
        decode = min(run.decode(context, new_tokens) for _ in range(repeats))
        peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        with Stream(engine.device, n_threads=engine.n_threads) as stream:
            threads = stream.n_threads if engine.device == "cpu" else 0
            report("measuring bandwidth")
            for _ in range(repeats):  # interleaved: the machine may be shared
                bandwidth = max(bandwidth, stream.probe("read_bandwidth"))
                decode = min(decode, run.decode(context, new_tokens))
        stages = adapter.profile()  # of the last decode
    finally:
        adapter.close()
    return {
        "model": shape or str(engine.model or path.name),
        "dtype": dtype,
        "kv_cache_dtype": kv_dtype,
        "threads": threads,  # CPU threads; 0 on a GPU
        "load_s": round(load_s, 3),  # opening the files and packing the weights
        "ttft_s": round(ttft_s, 3),  # load_s + the first token of a 16-token prompt
        "prefill_tok_s": round(prompt_tokens / prefill, 2),
        "decode_tok_s": round(new_tokens / decode, 2),
        # bytes of weights per second / measured bandwidth
        "bandwidth_fraction": round(read * new_tokens / decode / bandwidth, 4),
        "weights_mb": round(weights / 1e6, 1),  # in memory
        "kv_cache_mb": round(kv_bytes / 1e6, 1),
        "rss_mb": round(rss / 1e6, 1),  # of the process after the first token
        "base_rss_mb": round(base_rss / 1e6, 1),  # of the process before the load
        "peak_rss_mb": round(peak_rss / 1e6, 1),
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "stage_ms_per_token": {  # per model stage, while decoding
            stage: round(1e3 * seconds / new_tokens, 4) for stage, (seconds, _) in stages.items()
        },
    }


def shape_model_path(shape: str, dtype: str) -> Path:
    """The directory of a model with random weights of this shape, created on first use."""
    dtype_used = "bf16" if dtype == "auto" else dtype
    return write_shape_model(
        shape, dtype_used, cache_directory() / "shapes" / f"{shape}-{dtype_used}"
    )


def _adapter_options(checkpoint: Checkpoint, engine: EngineConfig, length: int) -> AdapterOptions:
    limit = checkpoint.config.max_position_embeddings
    if engine.max_model_len is not None:
        check_int("max_model_len", engine.max_model_len, min(length, limit), limit)
    return AdapterOptions(
        **model_options(engine),
        kv_cache_layout="block",
        kv_cache_block_size=BLOCK,
        max_model_len=engine.max_model_len or min(limit, length),
        exact=engine.exact,
    )


def model_options(engine: EngineConfig) -> dict[str, Any]:
    """The engine options that apply to a model without an engine, for AdapterOptions."""
    names = ("device", "dtype", "quantization", "n_threads")
    found = {name: getattr(engine, name) for name in names}
    return found | {"kv_cache_dtype": engine.cache.kv_cache_dtype}


def read_bytes(checkpoint: Checkpoint, options: AdapterOptions) -> int:
    """Bytes of weights read per decoded token: all but the table of an untied embedding."""
    sizes = weight_bytes(checkpoint, options)
    if not decoder_config(checkpoint).tie_word_embeddings:
        del sizes[EMBEDDING]
    return sum(sizes.values())


class _Run:
    """Greedy steps of one sequence; token i is in slot i."""

    def __init__(self, adapter: ModelAdapter, rng: np.random.Generator) -> None:
        self._adapter = adapter
        self._rng = rng
        self._greedy = SamplingMetadata(
            rows=np.zeros(1, np.int32), numbers={"temperature": np.zeros(1)}
        )
        self._position = 0  # tokens of the sequence

    def _step(self, tokens: np.ndarray[Any, np.dtype[np.int64]]) -> int:
        n = len(tokens)
        mask = np.zeros(n, np.int8)
        mask[-1] = 1
        positions = np.arange(self._position, self._position + n, dtype=np.int64)
        self._position += n
        attention = AttentionMetadata(
            slot_mapping=positions.astype(np.int32),
            batch_seq_ids=np.zeros(1, np.int64),
            context_lens=np.array([self._position], np.int32),
            block_tables=np.arange(-(-self._position // BLOCK), dtype=np.int32).reshape(1, -1),
        )
        step = ModelStepInput(tokens, positions, np.zeros(n, np.int64), mask)
        self._adapter.forward(step, attention)
        return int(self._adapter.sample(self._greedy)[0])

    def prompt(self, n: int) -> float:
        """Seconds from a prompt of n random tokens to its first sampled token."""
        self._position = 0
        tokens = self._rng.integers(0, self._adapter.vocab_size, n)
        start = time.perf_counter()
        self._step(tokens)
        return time.perf_counter() - start

    def decode(self, context: int, n: int) -> float:
        """Seconds to decode n tokens after a prompt of `context` tokens."""
        self.prompt(context)
        self._adapter.profile(reset=True)
        token = 0
        start = time.perf_counter()
        for _ in range(n):
            token = self._step(np.array([token], np.int64))
        return time.perf_counter() - start
