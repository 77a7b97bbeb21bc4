#!/usr/bin/env python3
"""Compare this engine with llama.cpp and transformers: interleaved runs of the same workloads.

    scripts/bench_compare_peers.py --shape smollm2-135m --shape qwen2.5-0.5b [--repeats 3] [--json]
        [--peers-python PATH]   an interpreter with llama-cpp-python (default: this one)
        [--format q8_0 --format q4_0 --format q4_k_m]   GGUF files quantized by llama.cpp, both
                                engines on the same file, instead of the dtypes above
        [--short]               fewer tokens

Weights are random (speed does not depend on them). Each measurement runs in a separate process, so
that engines do not share threads or memory; reports medians and ratios ours / theirs.

  decode1     1 sequence, 128 tokens of context, 64 new tokens: tokens/s; best of 3 (short: 2)
  prefill     one prompt of 512 tokens: tokens/s; best of 3 (short: 2)
  decode8/32  8 or 32 sequences (128 + 64, short: 64 + 12), decode steps only: total tokens/s
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTEXT, NEW_TOKENS, PROMPT = 128, 64, 512
FORMATS = {"q8_0": 7, "q4_0": 2, "q4_1": 3, "q4_k_m": 15, "q6_k": 18}  # LLAMA_FTYPE_MOSTLY_*
ENGINES = {  # name -> (engine, dtype)
    "ours bf16": ("llaisys", "bf16"),
    "ours f16": ("llaisys", "f16"),
    "ours f32": ("llaisys", "f32"),
    "llama.cpp F16": ("llama.cpp", "f16"),
    "transformers f32": ("transformers", "f32"),
}
CASES = ("decode1", "prefill", "decode8", "decode32")
PAIRS = {"ours bf16": "llama.cpp F16", "ours f32": "transformers f32"}  # printed ratios
for _format in FORMATS:
    ENGINES[f"ours {_format}"] = ("llaisys", _format)
    ENGINES[f"llama.cpp {_format}"] = ("llama.cpp", _format)
    PAIRS[f"ours {_format}"] = f"llama.cpp {_format}"


@dataclass(frozen=True, slots=True)
class Work:
    """The measurement of one process."""

    path: Path
    dtype: str
    threads: int
    context: int  # per sequence, with several sequences
    new_tokens: int  # per sequence, with several sequences
    repeats: int  # of decode1 and prefill, of which the best counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", action="append")
    parser.add_argument("--engine", action="append", choices=ENGINES)
    parser.add_argument("--format", action="append", choices=FORMATS)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--prepare", action="store_true", help="write the models and stop")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=3, metavar=("ENGINE", "DIR", "DTYPE"))
    options = parser.parse_args()
    if options.worker:
        engine, directory, dtype = options.worker
        many = (64, 12, 2) if options.short else (CONTEXT, NEW_TOKENS, 3)
        print(json.dumps(WORKERS[engine](Work(Path(directory), dtype, options.threads, *many))))
        return 0
    engines = options.engine or [n for n, (_, dtype) in ENGINES.items() if dtype not in FORMATS]
    if options.format:
        engines = [name for name, (_, dtype) in ENGINES.items() if dtype in options.format]
    for shape in options.shape or ["smollm2-135m", "qwen2.5-0.5b"]:
        models = {name: prepare(shape, *ENGINES[name], options.peers_python) for name in engines}
        if options.prepare:
            continue
        result = {shape: compare(shape, models, options)}
        if options.json:
            print(json.dumps(result), flush=True)
        else:
            print_tables(result)
    return 0


def compare(shape: str, models: dict[str, Path], options: argparse.Namespace) -> dict[str, Any]:
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
    for repeat in range(options.repeats):
        for name, path in models.items():
            engine, dtype = ENGINES[name]
            python = options.peers_python if engine == "llama.cpp" else sys.executable
            command = [python, __file__, "--threads", str(options.threads)]
            command += ["--short"] if options.short else []
            command += ["--worker", engine, str(path), dtype]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(f"{name} failed on {shape}")
            samples[name].append(json.loads(done.stdout.splitlines()[-1]))
            values = " ".join(f"{case} {samples[name][-1][case]:.1f}" for case in CASES)
            print(f"{shape} {repeat + 1}/{options.repeats} {name}: {values}", file=sys.stderr)
    return {
        name: {
            case: statistics.median(run[case] for run in runs) for case in CASES if case in runs[0]
        }
        | {"version": runs[0]["version"]}
        for name, runs in samples.items()
    }


def prepare(shape: str, engine: str, dtype: str, peers_python: str) -> Path:
    """The model of this shape in the engine's file format; written once."""
    from llaisys.bench.latency import shape_model_path

    if engine != "llama.cpp" and dtype not in FORMATS:
        return shape_model_path(shape, dtype)
    source = shape_model_path(shape, "bf16")
    wide = source.parent / f"{shape}-f16.gguf"
    if not wide.exists():
        write_gguf(source, wide)
    if dtype not in FORMATS:
        return wide
    target = source.parent / f"{shape}-{dtype}.gguf"
    if not target.exists():
        quantise(wide, target, dtype, peers_python)
    return target


QUANTISE = """
import sys, llama_cpp as lc
params = lc.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = int(sys.argv[3]), True
sys.exit(lc.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


def quantise(source: Path, target: Path, name: str, peers_python: str) -> None:
    """The GGUF file quantized to another type by llama.cpp."""
    arguments = [str(source), str(target), str(FORMATS[name])]
    subprocess.run([peers_python, "-c", QUANTISE, *arguments], check=True)


def write_gguf(source: Path, target: Path) -> None:
    """The same weights as an F16 GGUF without a tokenizer."""
    import gguf
    import numpy as np

    from llaisys.models.families import open_checkpoint
    from llaisys.models.families.model_config import decoder_config

    names = {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    checkpoint = open_checkpoint(source)
    config = decoder_config(checkpoint)
    writer = gguf.GGUFWriter(str(target), config.model_type)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for name in checkpoint.names():
        kind = name.rsplit(".", 1)[1]
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            short = f"blk.{layer}.{names[rest.rsplit('.', 1)[0]]}.{kind}"
        else:
            short = {
                "model.embed_tokens.weight": "token_embd.weight",
                "model.norm.weight": "output_norm.weight",
                "lm_head.weight": "output.weight",
            }[name]
        values = checkpoint.read(name, "f32")
        writer.add_tensor(short, values.astype(np.float16) if values.ndim > 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- one engine, one process ---------------------------------------------------------------------


def run_llaisys(work: Work) -> dict[str, Any]:
    from llaisys import LLM, __version__
    from llaisys.bench.latency import LatencyOptions, run_latency
    from llaisys.bench.throughput import run_concurrencies
    from llaisys.engine.config import EngineConfig

    path, threads = str(work.path), work.threads
    dtype = "auto" if work.dtype in FORMATS else work.dtype
    engine = EngineConfig.of(model=path, dtype=dtype, n_threads=threads)
    latency = run_latency(LatencyOptions(engine, repeats=work.repeats))
    with LLM(path, dtype=dtype, n_threads=threads, max_model_len=2048) as llm:
        runs = run_concurrencies(llm, [8, 32], work.context, work.new_tokens, repeats=1)
    return {
        "version": f"llaisys {__version__}",
        "decode1": latency["decode_tok_s"],
        "prefill": latency["prefill_tok_s"],
        **{f"decode{run['concurrency']}": run["decode_tok_s"] for run in runs},
    }


def run_llama_cpp(work: Work) -> dict[str, Any]:
    import llama_cpp as lc

    silent = lc.llama_log_callback(lambda level, text, data: None)
    lc.llama_log_set(silent, None)
    lc.llama_backend_init()
    params = lc.llama_model_default_params()
    params.n_gpu_layers = 0
    model = lc.llama_model_load_from_file(str(work.path).encode(), params)
    context = lc.llama_context_default_params()
    context.n_ctx = 32 * (CONTEXT + NEW_TOKENS + 8)
    context.n_batch = context.n_ubatch = PROMPT
    context.n_seq_max = 32
    context.kv_unified = True
    context.n_threads = context.n_threads_batch = work.threads
    handle = lc.llama_init_from_model(model, context)
    memory = lc.llama_get_memory(handle)
    batch = lc.llama_batch_init(PROMPT, 0, 1)

    def decode(tokens: list[tuple[int, int, int]]) -> None:
        """Decode one batch of (sequence, position, token); logits for the last of each sequence."""
        batch.n_tokens = len(tokens)
        for i, (seq, position, token) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.logits[i] = i + 1 == len(tokens) or tokens[i + 1][0] != seq
        if lc.llama_decode(handle, batch) != 0:
            raise SystemExit("llama_decode failed")
        lc.llama_synchronize(handle)

    def many(sequences: int, length: int, new_tokens: int) -> float:
        lc.llama_memory_clear(memory, True)
        for seq in range(sequences):
            decode([(seq, p, (p * 7 + seq) % 1000) for p in range(length)])
        start = time.perf_counter()
        for p in range(length, length + new_tokens):
            decode([(seq, p, p % 1000) for seq in range(sequences)])
        return sequences * new_tokens / (time.perf_counter() - start)

    def prefill() -> float:
        lc.llama_memory_clear(memory, True)
        start = time.perf_counter()
        decode([(0, p, (p * 7) % 1000) for p in range(PROMPT)])
        return PROMPT / (time.perf_counter() - start)

    prefill()
    return {
        "version": f"llama-cpp-python {lc.__version__}",
        "decode1": max(many(1, CONTEXT, NEW_TOKENS) for _ in range(work.repeats)),
        "prefill": max(prefill() for _ in range(work.repeats)),
        "decode8": many(8, work.context, work.new_tokens),
        "decode32": many(32, work.context, work.new_tokens),
    }


def run_transformers(work: Work) -> dict[str, Any]:
    import torch
    import transformers

    torch.set_num_threads(work.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        work.path, dtype={"f32": torch.float32, "bf16": torch.bfloat16}[work.dtype]
    ).eval()

    def many(sequences: int, new_tokens: int) -> float:
        tokens = torch.randint(0, 1000, (sequences, CONTEXT))
        with torch.no_grad():
            output = model(tokens, use_cache=True, logits_to_keep=1)
            start = time.perf_counter()
            for _ in range(new_tokens):
                tokens = output.logits[:, -1:].argmax(-1)
                output = model(
                    tokens, past_key_values=output.past_key_values, use_cache=True, logits_to_keep=1
                )
        return sequences * new_tokens / (time.perf_counter() - start)

    def prefill() -> float:
        start = time.perf_counter()
        with torch.no_grad():
            model(torch.randint(0, 1000, (1, PROMPT)), use_cache=True, logits_to_keep=1)
        return PROMPT / (time.perf_counter() - start)

    prefill()
    return {
        "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "decode1": many(1, NEW_TOKENS),
        "prefill": max(prefill() for _ in range(3)),
        "decode8": many(8, NEW_TOKENS // 2),
        "decode32": many(32, NEW_TOKENS // 4),
    }


WORKERS = {
    "llaisys": run_llaisys,
    "llama.cpp": run_llama_cpp,
    "transformers": run_transformers,
}


def print_tables(report: dict[str, Any]) -> None:
    """A Markdown table per shape; ratios above 1 mean that ours is faster."""
    for shape, engines in report.items():
        print(
            f"\n| {shape}, tok/s | "
            + " | ".join(CASES)
            + " |\n|---" * 1
            + "|---" * len(CASES)
            + "|"
        )
        for name, values in engines.items():
            cells = [f"{values[case]:.1f}" if case in values else "-" for case in CASES]
            print(f"| {name} ({values['version']}) | " + " | ".join(cells) + " |")
        for ours, theirs in PAIRS.items():
            if ours in engines and theirs in engines:
                ratios = [f"{engines[ours][c] / engines[theirs][c]:.2f}" for c in CASES]
                print(f"| {ours} / {theirs} | " + " | ".join(ratios) + " |")


if __name__ == "__main__":
    sys.exit(main())
