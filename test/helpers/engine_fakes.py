"""A model without weights for engine tests: the next token is a hash of the tokens in its block
table, so a wrong slot, block or length changes the output."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from fake_tokenizer import EOS, VOCAB, FakeTokenizer
from numpy.typing import NDArray

from llaisys import LLM
from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import SamplingParams
from llaisys.common.step import (
    AttentionMetadata,
    ForwardOutput,
    ModelStepInput,
    SamplingMetadata,
)
from llaisys.common.types import RequestOutput, StreamOutput, TokenLogprobs
from llaisys.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from llaisys.engine.llm_engine import LLMEngine
from llaisys.models.base import AdapterOptions, ModelAdapter

MAX_MODEL_LEN = 512


def state_of(tokens: Sequence[int] | NDArray[np.int64]) -> int:
    return zlib.crc32(np.asarray(tokens, dtype=np.int64).tobytes())


def sample_token(
    state: int, seed: int | None, choice: int, position: int, history: Sequence[int]
) -> int:
    """The token behind `state`; greedy when seed is None.

    A request without a seed gets 64 random bits from the engine: its answer never ends by chance,
    or every test that counts its tokens would fail once in a while. Tests' own seeds are small.
    """
    key = (state, tuple(history)) if seed is None else (state, seed, choice, position, *history)
    hashed = zlib.crc32(repr(key).encode())
    if seed is not None and seed >= 1 << 32:
        return EOS + 1 + hashed % (VOCAB - EOS - 1)
    return hashed % VOCAB


def expected_tokens(
    prompt: Sequence[int],
    max_tokens: int,
    seed: int | None = None,
    choice: int = 0,
    stops: Iterable[int] = (EOS,),
) -> list[int]:
    """The expected output (seed None: greedy)."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        token = sample_token(state_of(tokens), seed, choice, len(tokens), ())
        tokens.append(token)
        if token in stops:
            break
    return tokens[len(prompt) :]


HIDDEN = 8


def hidden_of(token: int) -> NDArray[np.float64]:
    """The hidden state of a token; independent of the context."""
    return np.sin((token + 1.0) * np.arange(1, HIDDEN + 1))


class FakeAdapter(ModelAdapter):
    """Checks its input arrays; counts calls; `on_forward` may raise."""

    max_len = MAX_MODEL_LEN

    def __init__(self, options: AdapterOptions) -> None:
        self.options = options
        self.vocab_size = VOCAB
        self.max_model_len = min(options.max_model_len or self.max_len, self.max_len)
        self.kv_capacity_tokens = options.kv_cache_capacity_tokens
        self.eos_token_ids = (EOS,)
        self.kv = np.full(self.kv_capacity_tokens, -1, dtype=np.int64)
        self.histories: dict[int, list[int]] = {}
        self.hidden_size = HIDDEN
        self.pools: dict[int, list[NDArray[np.float64]]] = {}
        self.num_forwards = 0
        self.num_tokens = 0
        self.num_copied = 0
        self.num_rotated = 0
        self.closed = False
        self.reverse_rows = False  # keep the output rows in another order
        self.on_forward: Callable[[ModelStepInput], None] | None = None
        self.on_sample: Callable[[SamplingMetadata], None] | None = None
        self.last_sampling: SamplingMetadata | None = None
        self.last_attention: AttentionMetadata | None = None
        self._states: list[int] = []
        self._sampled: list[int] = []

    @classmethod
    def kv_bytes_per_token(cls, checkpoint: Any, options: AdapterOptions) -> int:
        return 64

    @classmethod
    def load(cls, checkpoint: Any, options: AdapterOptions) -> FakeAdapter:
        return cls(options)

    def forward(self, step: ModelStepInput, attention: AttentionMetadata | None) -> ForwardOutput:
        assert attention is not None and not self.closed
        if self.on_forward is not None:
            self.on_forward(step)
        self.num_forwards += 1
        n, s = len(step.token_ids), len(attention.batch_seq_ids)
        self.num_tokens += n
        self.last_attention = attention
        assert len(set(attention.batch_seq_ids.tolist())) == s
        assert attention.block_tables.flags.c_contiguous and attention.block_tables.shape[0] == s
        assert len(set(attention.slot_mapping.tolist())) == n
        assert step.token_ids.min() >= 0 and step.token_ids.max() < VOCAB
        self.kv[attention.slot_mapping] = step.token_ids
        self._pool(step)
        size = self.options.kv_cache_block_size
        tables = attention.block_tables
        row_of = {seq: row for row, seq in enumerate(attention.batch_seq_ids.tolist())}
        marked = np.flatnonzero(step.logits_mask)
        if self.reverse_rows:
            marked = marked[::-1].copy()
        self._states = []
        for index in marked.tolist():
            row = row_of[int(step.seq_ids[index])]
            length = int(step.positions[index]) + 1
            assert length <= attention.context_lens[row]
            blocks = tables[row, : -(-length // size)]
            assert blocks.min() >= 0
            seen = self.kv.reshape(-1, size)[blocks].reshape(-1)[:length]
            assert seen.min() >= 0, "a slot was read before it was written"
            self._states.append(state_of(seen))
        return ForwardOutput(len(marked), marked.astype(np.int32))

    def _pool(self, step: ModelStepInput) -> None:
        if step.pooling is None:
            return
        assert len(step.pooling) == len(step.token_ids)
        for index in np.flatnonzero(step.pooling).tolist():
            vectors = self.pools.setdefault(int(step.seq_ids[index]), [])
            if step.pooling[index] == 1:
                vectors.clear()
            vectors.append(hidden_of(int(step.token_ids[index])))

    def pooled(self, seq_id: int) -> NDArray[np.float32]:
        return np.mean(self.pools[seq_id], axis=0).astype(np.float32)

    def pool_forget(self, seq_id: int) -> None:
        self.pools.pop(seq_id, None)

    def sample(self, sampling: SamplingMetadata) -> NDArray[np.int32]:
        if self.on_sample is not None:
            self.on_sample(sampling)
        self.last_sampling = sampling
        self._sampled = []
        for index, row in enumerate(sampling.rows.tolist()):
            temperature = sampling.numbers.get("temperature")
            greedy = temperature is not None and temperature[index] == 0
            history: Sequence[int] = ()
            if sampling.seq_ids is not None:
                history = self.histories.get(int(sampling.seq_ids[index]), ())
            seed = int(sampling.seeds[index]) if sampling.seeds is not None else 0
            position = int(sampling.positions[index]) if sampling.positions is not None else 0
            choice = int(sampling.choices[index]) if sampling.choices is not None else 0
            token = sample_token(
                self._states[row], None if greedy else seed, choice, position, history
            )
            tokens = ((token + k) % VOCAB for k in range(VOCAB))
            found = next((t for t in tokens if self._allowed(sampling, index, t)), None)
            if found is None:  # as the native sampler does
                raise InvalidInputError(f"row {index} has no token left")
            self._sampled.append(found)
        return np.array(self._sampled, dtype=np.int32)

    @staticmethod
    def _allowed(sampling: SamplingMetadata, index: int, token: int) -> bool:
        if sampling.mask_rows is not None and sampling.mask_rows[index] >= 0:
            assert sampling.masks is not None
            if not sampling.masks[sampling.mask_rows[index], token // 32] >> (token % 32) & 1:
                return False
        if sampling.bias_offsets is not None:
            assert sampling.bias_ids is not None and sampling.bias_values is not None
            span = slice(sampling.bias_offsets[index], sampling.bias_offsets[index + 1])
            banned = sampling.bias_ids[span][np.isneginf(sampling.bias_values[span])]
            return token not in banned.tolist()
        return True

    def logprobs(self, index: int) -> TokenLogprobs | None:
        sampling = self.last_sampling
        counts = None if sampling is None else sampling.numbers.get("n_logprobs")
        if counts is None or counts[index] < 0:
            return None
        count = int(counts[index])
        sampled = self._sampled[index]
        ids = [(sampled + k) % VOCAB for k in range(count)]
        return TokenLogprobs.of(sampled, -0.5, 1, [(i, -0.5 - k) for k, i in enumerate(ids)])

    def logits(self) -> NDArray[np.float32]:
        raise NotImplementedError

    def logits_row(self, row: int) -> NDArray[np.float32]:
        return np.zeros(VOCAB, np.float32)

    def sampler_reset(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.histories[seq_id] = list(prompt)

    def sampler_accept(self, seq_id: int, tokens: Sequence[int]) -> None:
        self.histories[seq_id].extend(tokens)

    def sampler_forget(self, seq_id: int) -> None:
        self.histories.pop(seq_id, None)

    def copy_slots(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        assert len(set(dst.tolist())) == len(dst)
        self.kv[dst] = self.kv[src]
        self.num_copied += len(dst)

    def shift_slots(self, slots: NDArray[np.int32], deltas: NDArray[np.int64]) -> None:
        assert len(set(slots.tolist())) == len(slots) == len(deltas) and self.kv[slots].min() >= 0
        self.num_rotated += len(slots)

    def reserve_host_blocks(self, num_blocks: int, fd: int = -1) -> None:
        size = self.options.kv_cache_block_size
        self.host = np.empty((num_blocks, size), dtype=np.int64)
        if fd >= 0:
            os.ftruncate(fd, self.host.nbytes)
            mapped = np.frombuffer(mmap.mmap(fd, self.host.nbytes), np.int64)
            self.host = mapped.reshape(num_blocks, size)
        self.host[:] = -1

    def swap_blocks(
        self, blocks: NDArray[np.int32], host_blocks: NDArray[np.int32], to_host: bool
    ) -> None:
        cache = self.kv.reshape(-1, self.options.kv_cache_block_size)
        written = host_blocks if to_host else blocks
        assert len(set(written.tolist())) == len(blocks) == len(host_blocks)
        if to_host:
            assert cache[blocks, 0].min() >= 0, "a block was saved before it was written"
            self.host[host_blocks] = cache[blocks]
        else:
            assert self.host[host_blocks, 0].min() >= 0, "a host slot was read before written"
            cache[blocks] = self.host[host_blocks]

    def close(self) -> None:
        self.closed = True


def make_config(
    num_blocks: int = 256,
    block_size: int = 4,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    **others: Any,
) -> EngineConfig:
    cache = {
        name: others.pop(name)
        for name in ("enable_prefix_caching", "prefix_cache_min_match", "kv_offload", "kv_transfer")
        if name in others
    }
    settings: dict[str, Any] = {
        "adapter_class": FakeAdapter,
        "tokenizer": FakeTokenizer(),
        "scheduler": SchedulerConfig(max_num_seqs, max_num_batched_tokens, min_prefill_chunk=4),
        "cache": CacheConfig(block_size=block_size, num_kv_blocks=num_blocks, **cache),
        "warmup": False,
    }
    return EngineConfig(**{**settings, **others})


def make_engine(**settings: Any) -> LLMEngine:
    return LLMEngine(make_config(**settings))


def adapter_of(engine: LLMEngine) -> FakeAdapter:
    adapter = engine.core.executor.worker.adapter  # type: ignore[attr-defined]
    assert isinstance(adapter, FakeAdapter)
    return adapter


def held_by(engine: LLMEngine) -> dict[str, int]:
    """What unfinished requests hold in the engine, without the worker; empty without one."""
    late = "worker_", "timeouts"
    state = engine.debug_state().items()
    return {name: count for name, count in state if count and not name.startswith(late)}


def run_all(engine: LLMEngine, max_steps: int = 100_000) -> dict[str, RequestOutput]:
    """Step until all requests have finished; return the outputs by request id."""
    finished: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished():
            return finished
        for part in engine.step():
            if part.output is not None:
                finished[part.request_id] = part.output
    raise AssertionError(f"not finished after {max_steps} steps: {engine.stats()}")


def run_prompts(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[list[int]]:
    names = [engine.submit(prompt, params) for prompt in prompts]
    finished = run_all(engine)
    return [finished[name].token_ids for name in names]


def texts(parts: Iterable[StreamOutput]) -> str:
    return "".join(part.text for part in parts)


def greedy(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **others)


def make_llm(**settings) -> LLM:
    base = {
        "adapter_class": FakeAdapter,
        "tokenizer": FakeTokenizer(),
        "num_kv_blocks": 128,
        "block_size": 4,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
    }
    return LLM(**{**base, **settings})


def is_idle(llm: LLM) -> bool:
    stats = llm.stats()
    llm.llm_engine.core.scheduler.check_integrity()
    return stats["kv_blocks_used"] == stats["num_running"] == stats[
        "num_waiting"
    ] == 0 and not held_by(llm.llm_engine)
