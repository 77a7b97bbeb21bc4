"""Training data, training loop and acceptance rates of a draft head."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from draft_training.answers import Answers, repeatable
from draft_training.head import Head
from draft_training.teacher import Teacher

SKIPPED = 24  # maximum number of skipped rows at the beginning, for a cached prefix
WARMING = 0.03  # fraction of the training with a rising learning rate


@dataclass(frozen=True)
class Recipe:
    steps: int  # maximum
    seconds: float  # maximum
    batch: int  # sequences per step
    rate: float  # peak learning rate
    depth: int  # drafts per chain
    fading: float = 0.8  # loss weight of a draft relative to the previous one
    noise: float = 0.02  # on the hidden states, relative to their magnitude


@dataclass(frozen=True)
class Rows:
    """Sequences and their hidden states, on the device."""

    tokens: Tensor  # [n, longest]
    prompt_lens: Tensor  # [n]
    lens: Tensor  # [n]
    last: Tensor  # [n, longest, hidden]: after the last norm
    features: Tensor  # [n, longest, features]: input of the head
    rank: Tensor  # [vocabulary]: row of the draft vocabulary, or -1
    output: Tensor  # [draft vocabulary, hidden]: rows of the model's output matrix
    embedding: Tensor  # [vocabulary, hidden]


@dataclass(frozen=True)
class Batch:
    embedded: Tensor  # [batch, n, hidden]: of tokens r + 1
    features: Tensor  # [batch, n, features]: of tokens r
    target: Tensor  # [batch, n]: token r + 2 as a row of the draft vocabulary, or -1
    likely: Tensor  # [batch, n, draft vocabulary]: the model's distribution of token r + 2
    counts: Tensor  # [batch, n]: whether token r + 2 belongs to an answer


def token_counts(answers: Answers, vocab: int) -> NDArray[np.int64]:
    positions = np.arange(answers.tokens.shape[1])[None]
    is_answer = (positions >= answers.prompt_lens[:, None]) & (positions < answers.lens[:, None])
    return np.bincount(answers.tokens[is_answer], minlength=vocab)


def frequent_tokens(answers: Answers, vocab: int, count: int) -> tuple[NDArray[np.int64], float]:
    """The `count` most frequent tokens of the answers, sorted, and their fraction of all tokens;
    filled with the lowest ids."""
    counts = token_counts(answers, vocab)
    order = np.argsort(-counts, kind="stable")[:count]
    return np.sort(order).astype(np.int64), float(counts[order].sum() / counts.sum())


def make_rows(
    answers: Answers,
    chosen: NDArray[np.int64],
    teacher: Teacher,
    token_ids: NDArray[np.int64],
    layers: Sequence[int],
    batch: int = 256,
) -> Rows:
    """`batch`: sequences per forward pass."""
    chosen = chosen[answers.lens[chosen] - answers.prompt_lens[chosen] >= 3]
    ids = torch.from_numpy(token_ids).to(teacher.device)
    rank = torch.full((teacher.config.vocab_size,), -1, device=teacher.device)
    rank[ids] = torch.arange(len(token_ids), device=teacher.device)
    tokens, prompt_lens, lens = (
        torch.from_numpy(values[chosen]).to(teacher.device)
        for values in (answers.tokens, answers.prompt_lens, answers.lens)
    )
    last, features = _hidden_of(tokens, teacher, layers, batch)
    output = teacher.output[ids]
    return Rows(tokens, prompt_lens, lens, last, features, rank, output, teacher.embedding)


def _hidden_of(
    tokens: Tensor, teacher: Teacher, layers: Sequence[int], batch: int
) -> tuple[Tensor, Tensor]:
    """Compute `Teacher.hidden` in batches of `batch` sequences, without a second copy."""
    hidden, is_last = teacher.config.hidden_size, tuple(layers) == (-1,)

    def buffer(width: int) -> Tensor:
        shape = (*tokens.shape, width)
        return torch.empty(shape, dtype=teacher.dtype, device=teacher.device)

    last = buffer(hidden)
    features = last if is_last else buffer(hidden * len(layers))
    for first in range(0, len(tokens), batch):
        part = slice(first, first + batch)
        last[part], found = teacher.hidden(tokens[part], layers)
        if not is_last:
            features[part] = found
    return last, features


def feature_scale(rows: Rows) -> Tensor:
    """Mean magnitude of each hidden state feature, [features]."""
    return rows.features[:32].float().pow(2).mean((0, 1)).sqrt().clamp_min(1e-3)


@torch.no_grad()
def make_batch(rows: Rows, chosen: Tensor, skipped: Tensor, count: int) -> Batch:
    """`count` rows of the sequences `chosen` [batch], from row `skipped` [1] on."""
    at = skipped + torch.arange(count, device=chosen.device)
    tokens = rows.tokens.index_select(0, chosen)
    after = rows.last.index_select(0, chosen).index_select(1, at + 1)
    positions = (at + 2)[None]
    prompt_lens, lens = (x.index_select(0, chosen)[:, None] for x in (rows.prompt_lens, rows.lens))
    return Batch(
        embedded=rows.embedding[tokens.index_select(1, at + 1)],
        features=rows.features.index_select(0, chosen).index_select(1, at),
        target=rows.rank[tokens.index_select(1, at + 2)],
        likely=functional.linear(after, rows.output).float().softmax(-1),
        counts=(positions >= prompt_lens) & (positions < lens),
    )


class Training:
    """Training steps, each over its own sequences; a CUDA graph on a GPU."""

    def __init__(self, head: Head, rows: Rows, teacher: Teacher, recipe: Recipe) -> None:
        self.head, self.rows, self.recipe = head.to(teacher.device).train(), rows, recipe
        self.is_cuda = teacher.is_cuda
        device, longest = teacher.device, rows.tokens.shape[1]
        self.skipped_below = max(1, min(SKIPPED, longest // 4))
        self.count = longest - 1 - self.skipped_below
        self.batch = min(recipe.batch, len(rows.lens))
        self.chosen = torch.zeros(self.batch, dtype=torch.long, device=device)
        self.skipped = torch.zeros(1, dtype=torch.long, device=device)
        self.loss = torch.zeros((), device=device)
        self.rate: float | Tensor = recipe.rate
        if self.is_cuda:  # the graph reads it from memory
            self.rate = torch.tensor(1e-9, device=device)
        self.optimizer = torch.optim.AdamW(
            head.parameters(), lr=self.rate, betas=(0.9, 0.95), capturable=self.is_cuda
        )
        self._step = repeatable(self._learn, self.is_cuda)

    def step(self, chosen: NDArray[np.int64], skipped: int, rate: float) -> None:
        """Run one step and set `loss`."""
        self.chosen.copy_(torch.from_numpy(chosen))
        self.skipped.fill_(skipped)
        if isinstance(self.rate, Tensor):
            self.rate.fill_(rate)
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        self._step()

    def _learn(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        batch = make_batch(self.rows, self.chosen, self.skipped, self.count)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.is_cuda, cache_enabled=False):
            loss = _loss(self.head, batch, self.recipe, self.rows.output)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        self.loss.copy_(loss.detach())


def train(
    training: Training, rng: np.random.Generator, show: Callable[[str, float], None]
) -> list[float]:
    """Train; returns the losses at intervals, which `show` receives with the step number. The loss
    is the divergence of each draft's distribution from the model's over the draft vocabulary. The
    learning rate decays with steps or time, whichever ends first."""
    recipe, losses, step, done = training.recipe, [], 0, 0.0
    begin, shown = time.monotonic(), 0.0
    order = rng.permutation(len(training.rows.lens))
    while done < 1:
        if len(order) < training.batch:
            order = rng.permutation(len(training.rows.lens))
        chosen, order = order[: training.batch], order[training.batch :]
        rate = recipe.rate * min(1.0, done / WARMING + 0.01) * (1 + np.cos(np.pi * done)) / 2
        training.step(chosen, int(rng.integers(0, training.skipped_below)), rate)
        step += 1
        if not training.is_cuda or step % 8 == 0:  # bounds the launch queue
            losses.append(float(training.loss))
            seconds = time.monotonic() - begin
            done = max(step / recipe.steps, seconds / recipe.seconds)
            if seconds - shown > 5 or done >= 1:
                shown = seconds
                show(f"step {step}, {seconds:.0f} s: loss {losses[-1]:.3f}", seconds)
    return losses


def _loss(head: Head, batch: Batch, recipe: Recipe, output: Tensor) -> Tensor:
    size = batch.features.float().pow(2).mean(-1, keepdim=True).sqrt()
    noise = recipe.noise * size * torch.randn_like(batch.features, dtype=torch.float32)
    features = (batch.features + noise).to(batch.features.dtype)
    total, weight = torch.zeros((), device=output.device), 1.0
    is_counted = batch.counts & (batch.target >= 0)
    for j, logits in enumerate(head(batch.embedded, features, recipe.depth, output)):
        counted = is_counted[:, j:]
        log_chances = functional.log_softmax(logits[:, j:].float(), -1)
        errors = -(batch.likely[:, j:] * log_chances).sum(-1)
        total = total + weight * (errors * counted).sum() / counted.sum().clamp_min(1)
        weight *= recipe.fading
    return total


@torch.no_grad()
def acceptance(head: Head, rows: Rows, depth: int, size: int) -> list[float]:
    """Fraction of rows whose drafts 1 .. j all match the answer, for j = 1 .. depth."""
    device = rows.tokens.device
    head.to(device).eval()
    accepted, total = torch.zeros(depth, device=device), 0
    start = torch.zeros(1, dtype=torch.long, device=device)
    for first in range(0, len(rows.lens), size):
        chosen = torch.arange(first, min(first + size, len(rows.lens)), device=device)
        batch = make_batch(rows, chosen, start, rows.tokens.shape[1] - 2)
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            drafts = head(batch.embedded, batch.features, depth, rows.output)
        right = batch.counts
        for j, logits in enumerate(drafts):
            # Row r of draft j belongs to the chain that started at row r - j.
            hit = (logits.argmax(-1) == batch.target) & batch.counts
            right = functional.pad(right, (1, -1)) & hit if j else hit
            accepted[j] += right.sum()
        total += int(batch.counts.sum())
    return [float(share) for share in accepted / max(1, total)]
