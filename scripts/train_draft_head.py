#!/usr/bin/env python3
"""Train draft heads for a model on its own answers.

    scripts/train_draft_head.py --out heads                         the default model, an EAGLE head
    scripts/train_draft_head.py --kinds eagle,eagle3,mtp --device cuda --out heads

The model answers prompts in torch; then a layer is trained to predict its next tokens. Needs torch,
and a GPU to finish in minutes; the native library is not needed. Writes, per kind,
OUT/KIND/model.safetensors and config.json, which `--speculative-config '{"method": "eagle",
"model": "heads/eagle"}'` opens, and README.md with the training data and acceptance rates. See
docs/guides/speculative_decoding.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from draft_training.answers import Answers, answer_all
from draft_training.head import PREFIXES, Head
from draft_training.prompts import Message, make_conversations
from draft_training.teacher import Teacher
from draft_training.training import (
    Recipe,
    Training,
    acceptance,
    feature_scale,
    frequent_tokens,
    make_rows,
    token_counts,
    train,
)
from numpy.typing import NDArray

from llaisys.models.families import open_checkpoint
from llaisys.models.loading.resolve import DEFAULT_MODEL, resolve_model
from llaisys.tokenization.tokenizer import Tokenizer

TEMPERATURE = 0.7  # of sampled answers
HELD_OUT = 0.03  # fraction of the answers for evaluation
SAVED = 20  # seconds between checkpoints


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="directory, GGUF file or hub name; else the default model")
    parser.add_argument("--kinds", default="eagle", help=f"of {', '.join(PREFIXES)}, with commas")
    parser.add_argument("--out", type=Path, required=True, help="directory of the heads")
    parser.add_argument("--prompts", type=Path, help="a text file, one prompt a line")
    parser.add_argument("--count", type=int, default=24000, help="prompts of the built-in list")
    parser.add_argument("--new-tokens", type=int, default=320, help="of an answer, at most")
    parser.add_argument("--answer-batch", type=int, default=2048, help="prompts answered together")
    parser.add_argument("--answer-seconds", type=float, default=90, help="for answers, at most")
    parser.add_argument("--steps", type=int, default=100000, help="of training, at most")
    parser.add_argument("--seconds", type=float, default=55, help="of training a head, at most")
    parser.add_argument("--batch", type=int, default=64, help="answers of a step of training")
    parser.add_argument("--depth", type=int, default=4, help="drafts of a chain that are trained")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="the highest learning rate")
    parser.add_argument("--draft-vocab", type=int, default=4096, help="tokens that it can draft")
    parser.add_argument("--intermediate", type=int, default=768, help="size of the MLP")
    parser.add_argument("--layers", default="10,20,30", help="whose inputs an EAGLE-3 head sees")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    options.kinds = options.kinds.split(",")
    unknown = [kind for kind in options.kinds if kind not in PREFIXES]
    if unknown:
        parser.error(f"--kinds: {', '.join(unknown)}; there are {', '.join(PREFIXES)}")
    return options


def conversations(options: argparse.Namespace) -> list[list[Message]]:
    if options.prompts is None:
        return make_conversations(options.count, options.seed)
    lines = options.prompts.read_text().splitlines()
    return [[{"role": "user", "content": line}] for line in lines if line.strip()]


def answers_of(options: argparse.Namespace, teacher: Teacher, tokenizer: Tokenizer) -> Answers:
    """Answers to the prompts, half of them greedy."""
    begin = time.monotonic()
    asked = conversations(options)
    answers = answer_all(
        teacher,
        len(asked),
        lambda index: tokenizer.encode_chat(asked[index]),
        lambda index: TEMPERATURE * (index % 2),
        options.new_tokens,
        options.answer_batch,
        options.answer_seconds,
    )
    seconds, tokens = time.monotonic() - begin, int((answers.lens - answers.prompt_lens).sum())
    print(f"{len(answers.lens)} answers, {tokens} tokens, {seconds:.0f} s", flush=True)
    return answers


def card_of(
    options: argparse.Namespace,
    kind: str,
    answers: Answers,
    losses: list[float],
    covered: float,
    rates: list[float],
) -> str:
    tokens = int((answers.lens - answers.prompt_lens).sum())
    source = "its own list of tasks and topics" if options.prompts is None else options.prompts.name
    model = DEFAULT_MODEL if options.model is None else Path(options.model).name
    return (
        f"# Draft head ({kind}) for {model}\n\n"
        "For this model only. Trained by `scripts/train_draft_head.py` on the model's answers to "
        f"{len(answers.lens)} prompts ({source}): {tokens} tokens, half of the answers greedy and "
        f"half at temperature {TEMPERATURE}. The output matrix is the model's.\n\n"
        f"- batches of {options.batch} answers for {options.seconds:g} s, chains of "
        f"{options.depth}, learning rate {options.rate}, seed {options.seed}\n"
        f"- draft vocabulary of {options.draft_vocab} tokens, {covered:.1%} of the tokens of the "
        f"answers; intermediate size {options.intermediate}\n"
        f"- loss: {f'first {losses[0]:.3f}, last {losses[-1]:.3f}' if losses else 'unfinished'}\n"
        "- acceptance of drafts 1 .. n on held-out answers: "
        f"{', '.join(f'{rate:.1%}' for rate in rates) or 'not measured'}\n"
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Train every kind; returns the losses."""
    options = parse(arguments)
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    begin = time.monotonic()
    with open_checkpoint(resolve_model(options.model or DEFAULT_MODEL)) as checkpoint:
        teacher = Teacher(checkpoint, options.device)
        source = checkpoint.tokenizer_source
    print(f"model read, {time.monotonic() - begin:.0f} s", flush=True)
    answers = answers_of(options, teacher, Tokenizer.from_source(source))
    vocab = teacher.config.vocab_size
    shares = np.sort(token_counts(answers, vocab))[::-1].cumsum()
    for count in (1024, 2048, 4096, 8192):
        print(f"{count} tokens cover {shares[min(count, vocab) - 1] / shares[-1]:.1%}")
    order = rng.permutation(len(answers.lens))
    return {kind: one_kind(options, kind, teacher, answers, order, rng) for kind in options.kinds}


def one_kind(
    options: argparse.Namespace,
    kind: str,
    teacher: Teacher,
    answers: Answers,
    order: NDArray[np.int64],
    rng: np.random.Generator,
) -> list[float]:
    """Train and write a head; returns its losses. Writes a checkpoint every SAVED seconds."""
    vocab = teacher.config.vocab_size
    token_ids, covered = frequent_tokens(answers, vocab, min(options.draft_vocab, vocab))
    held = max(1, int(HELD_OUT * len(order)))
    layers = tuple(map(int, options.layers.split(","))) if kind == "eagle3" else (-1,)
    begin = time.monotonic()
    rows, test = (
        make_rows(answers, chosen, teacher, token_ids, layers)
        for chosen in (order[held:], order[:held])
    )
    print(f"hidden states, {time.monotonic() - begin:.0f} s", flush=True)
    recipe = Recipe(options.steps, options.seconds, options.batch, options.rate, options.depth)
    token_scale = float(teacher.embedding.float().pow(2).mean().sqrt())
    scale = feature_scale(rows)
    head = Head(kind, teacher.config, options.intermediate, scale, token_scale, teacher.last_norm)
    training = Training(head, rows, teacher, recipe)
    saved = 0.0

    def write(losses: list[float], rates: list[float]) -> int:
        card = card_of(options, kind, answers, losses, covered, rates)
        return head.write(options.out / kind, token_ids, layers, card)

    def show(text: str, seconds: float) -> None:
        nonlocal saved
        print(text, flush=True)
        if seconds - saved > SAVED:
            saved = seconds
            write([], [])

    losses = train(training, rng, show)
    rates = acceptance(head, test, options.depth + 1, options.batch)
    size = write(losses, rates)
    shown = " ".join(f"{rate:.3f}" for rate in rates)
    print(f"{options.out / kind}: {size / 1e6:.1f} MB; right up to draft n: {shown}", flush=True)
    return losses


if __name__ == "__main__":
    main()
