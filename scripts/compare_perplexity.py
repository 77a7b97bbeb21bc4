#!/usr/bin/env python3
"""Perplexity of GGUF files with this engine and with llama.cpp, over the same tokens.

    scripts/compare_perplexity.py --file TEXT [--chunks 2] [--peers-python PATH] FILE.gguf ...
        [--make q8_0 --make q4_0 ...]   also quantize the first FILE to FILE-q8_0.gguf ... and
                                        compare those

Both compute chunks of 512 tokens from an empty cache and score the second half of each, as
llama-perplexity does, with the token ids of this engine's tokenizer. llama.cpp runs in a separate
process (--peers-python: an interpreter with llama-cpp-python; default: this one).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CONTEXT = 512
FORMATS = {"q8_0": 7, "q4_0": 2, "q4_1": 3, "q4_k_m": 15, "q6_k": 18}  # LLAMA_FTYPE_MOSTLY_*
QUANTISE = """
import sys, llama_cpp as lc
params = lc.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = int(sys.argv[3]), True
sys.exit(lc.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="+", type=Path)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--make", action="append", choices=FORMATS, default=[])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--worker", action="store_true", help="llama.cpp on ids from stdin")
    options = parser.parse_args()
    if options.worker:
        print(llama_cpp_loss(options.model[0], json.load(sys.stdin), options.threads))
        return 0
    if options.file is None:
        parser.error("--file: the text whose tokens are scored")
    models: list[Path] = list(options.model)
    for name in options.make:
        target = models[0].with_name(f"{models[0].stem}-{name}.gguf")
        if not target.exists():
            arguments = [str(models[0]), str(target), str(FORMATS[name])]
            subprocess.run([options.peers_python, "-c", QUANTISE, *arguments], check=True)
        models.append(target)
    print("| file | tokens | ours | llama.cpp | difference |\n|---|---|---|---|---|")
    for model in models:
        ours, chunks = our_perplexity(model, options)
        command = [options.peers_python, __file__, "--worker", "--threads", str(options.threads)]
        done = subprocess.run(
            [*command, str(model)],
            input=json.dumps(chunks),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        theirs = math.exp(float(done.stdout.splitlines()[-1]))
        tokens, own = ours["tokens_scored"], ours["perplexity"]
        difference = f"{100 * (own / theirs - 1):+.2f} %"
        print(f"| {model.name} | {tokens} | {own:.3f} | {theirs:.3f} | {difference} |", flush=True)
    return 0


def our_perplexity(
    model: Path, options: argparse.Namespace
) -> tuple[dict[str, Any], list[list[int]]]:
    """The report of `llaisys bench perplexity`, and the token ids of its chunks."""
    from llaisys.bench.perplexity import cut, run_perplexity
    from llaisys.engine.config import EngineConfig
    from llaisys.models.families import open_checkpoint
    from llaisys.tokenization import Tokenizer

    engine = EngineConfig.of(model=str(model), n_threads=options.threads)
    report = run_perplexity(options.file, engine, context=CONTEXT, chunks=options.chunks)
    with open_checkpoint(model) as checkpoint:
        encoder = Tokenizer.from_source(checkpoint.tokenizer_source)
    text = options.file.read_text(encoding="utf-8")
    return report, cut(encoder, text, CONTEXT)[: options.chunks].tolist()


def llama_cpp_loss(path: Path, chunks: list[list[int]], threads: int) -> float:
    """Mean loss in nats over the second halves of the chunks."""
    import llama_cpp as lc
    import numpy as np

    silent = lc.llama_log_callback(lambda level, text, data: None)
    lc.llama_log_set(silent, None)
    lc.llama_backend_init()
    model = lc.llama_model_load_from_file(str(path).encode(), lc.llama_model_default_params())
    context = lc.llama_context_default_params()
    context.n_ctx = context.n_batch = context.n_ubatch = CONTEXT
    context.n_threads = context.n_threads_batch = threads
    handle = lc.llama_init_from_model(model, context)
    batch = lc.llama_batch_init(CONTEXT, 0, 1)
    width = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
    half = CONTEXT // 2
    losses: list[float] = []
    for ids in chunks:
        lc.llama_memory_clear(lc.llama_get_memory(handle), True)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i] = token, i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = half <= i < len(ids) - 1
        if lc.llama_decode(handle, batch) != 0:
            raise SystemExit("llama_decode failed")
        for i in range(half, len(ids) - 1):
            row = np.ctypeslib.as_array(lc.llama_get_logits_ith(handle, i), (width,))
            row = row.astype(np.float64)
            top = row.max()
            losses.append(float(top + np.log(np.exp(row - top).sum()) - row[ids[i + 1]]))
    return sum(losses) / len(losses)


if __name__ == "__main__":
    sys.exit(main())
