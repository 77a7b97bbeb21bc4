"""One adapter per engine: a loaded model that runs prompts and decode steps on the CPU.

`prefill(n)` returns the seconds from a prompt of n tokens to its first token. `decode(sequences,
context, new_tokens)` returns the tokens per second, all sequences together, of the steps in which
every sequence decodes.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

MAX_SEQUENCES = 32
MAX_BATCHED_TOKENS = 2048  # of one step


@dataclass(frozen=True, slots=True)
class Load:
    """What an adapter loads."""

    path: Path
    format_name: str
    threads: int
    max_tokens: int  # of one sequence
    cache_tokens: int  # of all sequences together


class Engine(Protocol):
    version: str

    def prefill(self, tokens: int) -> float: ...

    def decode(self, sequences: int, context: int, new_tokens: int) -> float: ...


def prompt_of(tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 1000, tokens).tolist()


class Llaisys:
    def __init__(self, load: Load) -> None:
        from llaisys import LLM, __version__

        self.version = f"llaisys {__version__}"
        self._llm = LLM(
            str(load.path),
            device="cpu",
            n_threads=load.threads,
            max_model_len=load.max_tokens,
            max_num_seqs=MAX_SEQUENCES,
            enable_prefix_caching=False,
        )

    def prefill(self, tokens: int) -> float:
        from llaisys import SamplingParams

        params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0, detokenize=False)
        start = time.perf_counter()
        self._llm.generate([prompt_of(tokens, 0)], params)
        return time.perf_counter() - start

    def decode(self, sequences: int, context: int, new_tokens: int) -> float:
        from llaisys.bench.throughput import run_concurrencies

        run = run_concurrencies(self._llm, [sequences], context, new_tokens, repeats=1)[0]
        rate: float = run["decode_tok_s"]
        return rate


class LlamaCpp:
    def __init__(self, load: Load) -> None:
        import llama_cpp as lc

        self.version = f"llama-cpp-python {lc.__version__}"
        self._lc = lc
        self._silent = lc.llama_log_callback(lambda level, text, data: None)
        lc.llama_log_set(self._silent, None)
        lc.llama_backend_init()
        params = lc.llama_model_default_params()
        params.n_gpu_layers = 0
        model = lc.llama_model_load_from_file(str(load.path).encode(), params)
        if not model:
            raise SystemExit(f"llama.cpp cannot load {load.path}")
        context = lc.llama_context_default_params()
        context.n_ctx = load.cache_tokens
        context.n_batch = MAX_BATCHED_TOKENS
        context.n_seq_max = MAX_SEQUENCES
        context.kv_unified = True
        context.n_threads = context.n_threads_batch = load.threads
        self._handle = lc.llama_init_from_model(model, context)
        self._memory = lc.llama_get_memory(self._handle)
        self._batch = lc.llama_batch_init(MAX_BATCHED_TOKENS, 0, 1)

    def _decode(self, tokens: list[tuple[int, int, int]]) -> None:
        """One batch of (sequence, position, token); logits for the last token of each sequence."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (seq, position, token) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.logits[i] = i + 1 == len(tokens) or tokens[i + 1][0] != seq
        if self._lc.llama_decode(self._handle, batch) != 0:
            raise SystemExit("llama_decode failed")
        self._lc.llama_synchronize(self._handle)

    def _prompt(self, seq: int, tokens: int) -> None:
        ids = prompt_of(tokens, seq)
        for first in range(0, tokens, MAX_BATCHED_TOKENS):
            last = min(tokens, first + MAX_BATCHED_TOKENS)
            self._decode([(seq, p, ids[p]) for p in range(first, last)])

    def prefill(self, tokens: int) -> float:
        self._lc.llama_memory_clear(self._memory, True)
        start = time.perf_counter()
        self._prompt(0, tokens)
        return time.perf_counter() - start

    def decode(self, sequences: int, context: int, new_tokens: int) -> float:
        self._lc.llama_memory_clear(self._memory, True)
        for seq in range(sequences):
            self._prompt(seq, context)
        start = time.perf_counter()
        for position in range(context, context + new_tokens):
            self._decode([(seq, position, position % 1000) for seq in range(sequences)])
        return sequences * new_tokens / (time.perf_counter() - start)


class OpenVino:
    """The continuous batching pipeline of OpenVINO GenAI with its default precisions."""

    def __init__(self, load: Load) -> None:
        import openvino as ov
        import openvino_genai as genai

        self.version = f"openvino-genai {genai.__version__}"
        self._ov, self._genai = ov, genai
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = -(-load.cache_tokens // 32) + MAX_SEQUENCES
        scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
        scheduler.max_num_seqs = MAX_SEQUENCES
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": load.threads, "PERFORMANCE_HINT": "LATENCY"}
        self._pipe = genai.ContinuousBatchingPipeline(str(load.path), scheduler, "CPU", properties)
        self._requests = 0

    def _submit(self, tokens: int, seed: int, new_tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos, config.do_sample = True, False
        ids = np.array([prompt_of(tokens, seed)], np.int64)
        self._requests += 1
        return self._pipe.add_request(self._requests, self._ov.Tensor(ids), config)

    def _run(self, sequences: int, tokens: int, new_tokens: int) -> list[float]:
        """Seconds of each step."""
        handles = [self._submit(tokens, seed, new_tokens) for seed in range(sequences)]
        steps = []
        while self._pipe.has_non_finished_requests():
            start = time.perf_counter()
            self._pipe.step()
            steps.append(time.perf_counter() - start)
        for handle in handles:
            handle.read_all()
        return steps

    def prefill(self, tokens: int) -> float:
        return sum(self._run(1, tokens, 1))

    def decode(self, sequences: int, context: int, new_tokens: int) -> float:
        # All but the first and last few steps decode one token of every sequence.
        return sequences / statistics.median(self._run(sequences, context, new_tokens + 1))


class OnnxRuntime:
    """ONNX Runtime GenAI on a model folder of its model builder."""

    def __init__(self, load: Load) -> None:
        import onnxruntime_genai as genai

        self.version = f"onnxruntime-genai {genai.__version__}"
        self._genai, self._max_tokens = genai, load.max_tokens
        config = genai.Config(str(load.path))
        session = {"intra_op_num_threads": load.threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self._model = genai.Model(config)

    def _generator(self, sequences: int, context: int, new_tokens: int) -> Any:
        params = self._genai.GeneratorParams(self._model)
        length = context + new_tokens + 1
        params.set_search_options(batch_size=sequences, max_length=length, min_length=length)
        generator = self._genai.Generator(self._model, params)
        ids = np.array([prompt_of(context, seed) for seed in range(sequences)], np.int32)
        generator.append_tokens(ids)
        generator.generate_next_token()
        return generator

    def prefill(self, tokens: int) -> float:
        start = time.perf_counter()
        self._generator(1, tokens, 1)
        return time.perf_counter() - start

    def decode(self, sequences: int, context: int, new_tokens: int) -> float:
        generator = self._generator(sequences, context, new_tokens)
        start = time.perf_counter()
        for _ in range(new_tokens):
            generator.generate_next_token()
        return sequences * new_tokens / (time.perf_counter() - start)


class Transformers:
    """Hugging Face transformers with a static cache; `compile`: decode steps by torch.compile."""

    def __init__(self, load: Load, compile_steps: bool = False) -> None:
        import torch
        import transformers

        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._torch, self._transformers = torch, transformers
        self._max_tokens = load.max_tokens
        torch.set_num_threads(load.threads)
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[load.format_name]
        model = transformers.AutoModelForCausalLM.from_pretrained(load.path, dtype=dtype)
        self._model = model.eval()
        self._step = torch.compile(self._model, dynamic=False) if compile_steps else self._model
        self._compiles = compile_steps

    def _prompt(self, sequences: int, tokens: int, room: int) -> tuple[Any, Any]:
        torch = self._torch
        ids = torch.tensor([prompt_of(tokens, seed) for seed in range(sequences)])
        cache: Any = self._transformers.DynamicCache()
        if self._compiles:
            cache = self._transformers.StaticCache(self._model.config, max_cache_len=room)
        with torch.no_grad():
            output = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1:].argmax(-1), output.past_key_values

    def prefill(self, tokens: int) -> float:
        start = time.perf_counter()
        self._prompt(1, tokens, tokens + 1)
        return time.perf_counter() - start

    def decode(self, sequences: int, context: int, new_tokens: int) -> float:
        torch = self._torch
        ids, cache = self._prompt(sequences, context, context + new_tokens + 2)
        start = 0.0
        with torch.no_grad():
            for i in range(new_tokens + 2):
                if i == 2:  # after the steps that compile
                    start = time.perf_counter()
                position = torch.tensor([context + i])
                output = self._step(
                    ids,
                    past_key_values=cache,
                    cache_position=position,
                    use_cache=True,
                    logits_to_keep=1,
                )
                ids, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        return sequences * new_tokens / (time.perf_counter() - start)


def compiled_transformers(load: Load) -> Transformers:
    return Transformers(load, compile_steps=True)


ENGINES: dict[str, Any] = {
    "ours": Llaisys,
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
    "onnxruntime": OnnxRuntime,
    "transformers": Transformers,
    "torch.compile": compiled_transformers,
}
