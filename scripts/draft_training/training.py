"""Answers become rows, rows become a head; and how many of its drafts would be accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from draft_training.head import Head
from draft_training.teacher import Answers, Teacher


@dataclass(frozen=True)
class Recipe:
    steps: int  # at most
    seconds: float  # likewise
    batch: int  # sequences of a step
    rate: float  # the highest learning rate
    depth: int  # drafts of a chain
    fading: float = 0.8  # weight of a draft against the one before it
    noise: float = 0.02  # on the model's hidden states, as a share of their size


@dataclass(frozen=True)
class Rows:
    """Sequences on the device, rising by length, and what the head may draft of them."""

    tokens: Tensor  # [n, longest]
    prompt_lens: Tensor  # [n]
    lens: Tensor  # [n]
    rank: Tensor  # [vocabulary]: the row of the draft vocabulary, or -1
    output: Tensor  # [draft vocabulary, hidden]: the model's rows


def frequent_tokens(answers: Answers, vocab: int, count: int) -> tuple[NDArray[np.int64], float]:
    """The `count` that answers have most, rising, and their share of all; the lowest ids where
    there are not so many."""
    counts = token_counts(answers, vocab)
    order = np.argsort(-counts, kind="stable")[:count]
    return np.sort(order).astype(np.int64), float(counts[order].sum() / counts.sum())


def token_counts(answers: Answers, vocab: int) -> NDArray[np.int64]:
    places = np.arange(answers.tokens.shape[1])[None]
    is_answer = (places >= answers.prompt_lens[:, None]) & (places < answers.lens[:, None])
    return np.bincount(answers.tokens[is_answer], minlength=vocab)


def make_rows(
    answers: Answers, chosen: NDArray[np.int64], teacher: Teacher, token_ids: NDArray[np.int64]
) -> Rows:
    chosen = chosen[answers.lens[chosen] - answers.prompt_lens[chosen] >= 3]
    chosen = chosen[np.argsort(answers.lens[chosen], kind="stable")]
    ids = torch.from_numpy(token_ids).to(teacher.device)
    rank = torch.full((teacher.config.vocab_size,), -1, device=teacher.device)
    rank[ids] = torch.arange(len(token_ids), device=teacher.device)

    def on_device(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values[chosen]).to(teacher.device)

    return Rows(
        on_device(answers.tokens),
        on_device(answers.prompt_lens),
        on_device(answers.lens),
        rank,
        teacher.output[ids],
    )


def feature_scale(rows: Rows, teacher: Teacher, layers: Sequence[int]) -> Tensor:
    """How large each number of the hidden states is on average, [features]."""
    longest = int(rows.lens[-1])
    features = teacher.hidden(rows.tokens[-32:, :longest], layers).float()
    return features.pow(2).mean((0, 1)).sqrt().clamp_min(1e-3)


@dataclass(frozen=True)
class Batch:
    embedded: Tensor  # [batch, n, hidden]: of tokens r + 1
    features: Tensor  # [batch, n, features]: of tokens r
    wanted: Tensor  # [batch, n]: token r + 2 by its row of the draft vocabulary, or -1
    likely: Tensor  # [batch, n, draft vocabulary]: what the model says of token r + 2
    counts: Tensor  # [batch, n]: whether token r + 2 is of an answer


def batches(
    rows: Rows, teacher: Teacher, layers: Sequence[int], size: int, rng: np.random.Generator
) -> Iterator[Batch]:
    """Once through all sequences, those of similar length together, in any order."""
    starts = np.arange(0, len(rows.lens), size)
    for start in rng.permutation(starts):
        part = slice(int(start), int(start) + size)
        yield make_batch(rows, teacher, layers, part, int(rng.integers(0, 24)))


@torch.no_grad()
def make_batch(
    rows: Rows, teacher: Teacher, layers: Sequence[int], part: slice, skipped: int
) -> Batch:
    """The head does not see the first `skipped` rows: so it is behind a known prefix."""
    lens = rows.lens[part]
    longest = int(lens.max())
    skipped = min(skipped, longest // 4)
    tokens = rows.tokens[part, :longest]
    last = teacher.hidden(tokens, (-1,))
    features = last if tuple(layers) == (-1,) else teacher.hidden(tokens, layers)
    likely = functional.linear(last[:, skipped + 1 : -1], rows.output).float().softmax(-1)
    places = torch.arange(skipped + 2, longest, device=tokens.device)[None]
    wanted = rows.rank[tokens[:, skipped + 2 :]]
    counts = (places >= rows.prompt_lens[part, None]) & (places < lens[:, None])
    embedded = teacher.embedding[tokens[:, skipped + 1 : -1]]
    return Batch(embedded, features[:, skipped:-2], wanted, likely, counts)


def train(
    head: Head,
    rows: Rows,
    teacher: Teacher,
    layers: Sequence[int],
    recipe: Recipe,
    rng: np.random.Generator,
    show: Callable[[str], None] = print,
) -> list[float]:
    """The loss of every step: how far each draft's distribution is from the model's, over the
    tokens that the head can draft. The rate falls with the steps or the time, whichever ends
    first."""
    head.to(teacher.device).train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.rate, betas=(0.9, 0.95))
    is_cuda = teacher.device.startswith("cuda")
    losses: list[float] = []
    kept: list[Tensor] = []
    begin = time.monotonic()
    done = 0.0
    while done < 1:
        for batch in batches(rows, teacher, layers, recipe.batch, rng):
            done = max(len(kept) / recipe.steps, (time.monotonic() - begin) / recipe.seconds)
            if done >= 1:
                break
            rate = recipe.rate * min(1.0, 0.1 + done / 0.03) * (1 + np.cos(np.pi * done)) / 2
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast("cuda", torch.bfloat16, enabled=is_cuda):
                loss = _loss(head, batch, recipe, rows.output)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            kept.append(loss.detach())
            if len(kept) % 100 == 1:
                seconds = time.monotonic() - begin
                show(f"step {len(kept)}: loss {float(kept[-1]):.3f}, {seconds:.0f} s")
    losses = [float(loss) for loss in kept]
    show(f"{len(losses)} steps, {time.monotonic() - begin:.0f} s, loss {losses[-1]:.3f}")
    return losses


def _loss(head: Head, batch: Batch, recipe: Recipe, output: Tensor) -> Tensor:
    size = batch.features.float().pow(2).mean(-1, keepdim=True).sqrt()
    noise = recipe.noise * size * torch.randn_like(batch.features, dtype=torch.float32)
    features = (batch.features + noise).to(batch.features.dtype)
    total, weight = torch.zeros((), device=output.device), 1.0
    for j, logits in enumerate(head(batch.embedded, features, recipe.depth, output)):
        is_counted = batch.counts & (batch.wanted >= 0)
        is_counted[:, :j] = False
        log_chances = functional.log_softmax(logits.float(), -1)
        errors = -(batch.likely * log_chances).sum(-1)
        total = total + weight * (errors * is_counted).sum() / is_counted.sum().clamp_min(1)
        weight *= recipe.fading
    return total


@torch.no_grad()
def acceptance(
    head: Head, rows: Rows, teacher: Teacher, layers: Sequence[int], depth: int, size: int
) -> list[float]:
    """The share of rows whose drafts 1 .. j are all what the answer has, for j = 1 .. depth."""
    head.to(teacher.device).eval()
    accepted, total = torch.zeros(depth, device=teacher.device), 0
    is_cuda = teacher.device.startswith("cuda")
    for start in range(0, len(rows.lens), size):
        batch = make_batch(rows, teacher, layers, slice(start, start + size), 0)
        with torch.autocast("cuda", torch.bfloat16, enabled=is_cuda):
            drafts = head(batch.embedded, batch.features, depth, rows.output)
        right = batch.counts
        for j, logits in enumerate(drafts):
            # Row r of draft j belongs to the chain that began at row r - j.
            hit = (logits.argmax(-1) == batch.wanted) & batch.counts
            right = functional.pad(right, (1, -1)) & hit if j else hit
            accepted[j] += right.sum()
        total += int(batch.counts.sum())
    return [float(share) for share in accepted / max(1, total)]
