"""Batch generation of training answers. All sequences are at the same position, so that every step
runs the same kernels on the same memory and a GPU replays it as a graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from draft_training.teacher import Teacher, rotation

ROOM = 128  # attention lengths are multiples of this


@dataclass(frozen=True)
class Answers:
    """Prompts and answers, in CPU memory."""

    tokens: NDArray[np.int64]  # [n, longest], padded with 0
    prompt_lens: NDArray[np.int64]  # [n]
    lens: NDArray[np.int64]  # [n]: prompt and answer


def repeatable(step: Callable[[], None], is_cuda: bool) -> Callable[[], None]:
    """`step` itself, or its CUDA graph after a few warm-up runs."""
    if not is_cuda:
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


class Decoding:
    """`batch` sequences at one position; buffers are allocated once."""

    def __init__(self, teacher: Teacher, batch: int, longest: int) -> None:
        self.teacher, self.batch = teacher, batch
        self.longest = longest = -(-longest // ROOM) * ROOM
        config, device = teacher.config, teacher.device
        self.tokens = torch.zeros(batch, longest, dtype=torch.long, device=device)
        self.prompt_lens = torch.zeros(batch, dtype=torch.long, device=device)
        self.ends = torch.zeros_like(self.prompt_lens)  # limit of each answer
        self.is_done = torch.zeros_like(self.prompt_lens, dtype=torch.bool)
        self.heat = torch.zeros(batch, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.stops = torch.tensor(config.eos_token_ids, device=device, dtype=torch.long)
        self.cos, self.sin = rotation(torch.arange(longest, device=device), config)
        shape = (config.num_layers, 2, batch, config.num_kv_heads, longest, config.head_dim)
        self.cache = torch.zeros(shape, device=device, dtype=teacher.dtype)
        self._steps: dict[int, Callable[[], None]] = {}  # by attention length

    @torch.no_grad()
    def answer(
        self, prompts: Sequence[Sequence[int]], heat: Sequence[float], new_tokens: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(tokens, lengths of the prompts, lengths) of at most `batch` prompts."""
        count = len(prompts)
        padded = [*prompts, *[prompts[0]] * (self.batch - count)]
        given = np.zeros((self.batch, self.longest), dtype=np.int64)
        for row, prompt in enumerate(padded):
            given[row, : len(prompt)] = prompt
        lens = np.array([len(prompt) for prompt in padded])
        for position in range(0, self.longest, ROOM):  # graphs are captured before the state is set
            self._step(position)
        self.tokens.copy_(torch.from_numpy(given))
        self.prompt_lens.copy_(torch.from_numpy(lens))
        self.ends.copy_(self.prompt_lens + new_tokens)
        self.heat[:count] = torch.tensor(heat, device=self.heat.device)
        self.heat[count:] = 0
        self.is_done.zero_()
        self.position.zero_()
        for position in range(min(self.longest - 1, int(lens.max()) + new_tokens - 1)):
            self._step(position)()
            if position % 16 == 15 and bool(self.is_done.all()):
                break
        tokens, ends = self.tokens.cpu().numpy(), self.ends.cpu().numpy()
        return tokens[:count], lens[:count], ends[:count]

    def _step(self, position: int) -> Callable[[], None]:
        room = (position // ROOM + 1) * ROOM
        if room not in self._steps:
            self.position.fill_(min(position, self.longest - 5))  # warm-up steps stay in bounds
            self._steps[room] = repeatable(lambda: self._advance(room), self.teacher.is_cuda)
        return self._steps[room]

    def _advance(self, room: int) -> None:
        """Advance all sequences by the next token of the prompt, the sampled token, or nothing."""
        teacher, position, after = self.teacher, self.position, self.position + 1
        config, batch = teacher.config, self.batch
        groups = config.num_heads // config.num_kv_heads
        mask = torch.zeros(room, device=position.device, dtype=teacher.dtype)
        mask = mask.masked_fill(torch.arange(room, device=position.device) > position, -torch.inf)
        mask = mask.expand(batch, config.num_kv_heads, groups, room)

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache[index]
            keys.index_copy_(2, position, k.transpose(1, 2))
            values.index_copy_(2, position, v.transpose(1, 2))
            # Query heads of the same key/value head are rows of one attention.
            q = q.reshape(batch, config.num_kv_heads, groups, config.head_dim)
            mixed = functional.scaled_dot_product_attention(
                q, keys[:, :, :room], values[:, :, :room], attn_mask=mask
            )
            return mixed.reshape(batch, 1, -1)

        cos, sin = self.cos.index_select(0, position), self.sin.index_select(0, position)
        last, _ = teacher.run(self.tokens.index_select(1, position), cos, sin, attend)
        logits = functional.linear(last[:, 0], teacher.output).float()
        noise = torch.rand_like(logits).clamp_min(1e-20)
        sampled = (logits - self.heat[:, None] * (-noise.log()).log()).argmax(-1)
        is_prompt = after < self.prompt_lens
        is_done = self.is_done | (after >= self.ends)
        answered = torch.where(is_done, 0, sampled)
        answered = torch.where(is_prompt, self.tokens.index_select(1, after)[:, 0], answered)
        self.tokens.index_copy_(1, after, answered[:, None])
        is_stop = (sampled[:, None] == self.stops).any(-1) & ~is_prompt & ~is_done
        self.ends.copy_(torch.where(is_stop, after + 1, self.ends))
        self.is_done.copy_(is_done | is_stop)
        position.add_(1)


def answer_all(
    teacher: Teacher,
    count: int,
    encode: Callable[[int], list[int]],  # index of a prompt -> token ids
    heat_of: Callable[[int], float],
    new_tokens: int,
    batch: int,
    seconds: float,
) -> Answers:
    """Answers to the prompts up to EOS, in order, as many as fit into the time. Prompts are encoded
    while earlier ones are answered."""
    begin, parts = time.monotonic(), []
    batch = min(batch, count)
    pieces = [range(first, min(count, first + batch)) for first in range(0, count, batch)]
    with ThreadPoolExecutor(1) as pool:

        def ask(number: int) -> list[list[int]]:
            return [encode(index) for index in pieces[number]]

        coming = pool.submit(ask, 0)
        decoding: Decoding | None = None
        for number, piece in enumerate(pieces):
            prompts = coming.result()
            if number + 1 < len(pieces):
                coming = pool.submit(ask, number + 1)
            if decoding is None:
                room = max(len(prompt) for prompt in prompts) + new_tokens + 16
                decoding = Decoding(teacher, batch, room)
            prompts = [prompt[: decoding.longest - new_tokens] for prompt in prompts]
            parts.append(decoding.answer(prompts, [heat_of(i) for i in piece], new_tokens))
            if time.monotonic() - begin > seconds:
                coming.cancel()
                break
    tokens, prompt_lens, lens = (np.concatenate(part) for part in zip(*parts, strict=True))
    longest = int(lens.max())
    return Answers(tokens[:, :longest], prompt_lens, lens)
