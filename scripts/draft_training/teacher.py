"""The model that a head drafts for, in torch: it answers prompts, many at a time, and its hidden
states are what the head learns from. The weights are read as the engine reads them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from llaisys.common.errors import ModelLoadError
from llaisys.models.families.decoder_tensors import EMBEDDING, OUTPUT
from llaisys.models.families.model_config import ModelConfig, decoder_config
from llaisys.models.loading.checkpoint import Checkpoint


@dataclass(frozen=True)
class Answers:
    """Prompts and what the model said, on the CPU."""

    tokens: NDArray[np.int64]  # [n, longest], 0 behind the end
    prompt_lens: NDArray[np.int64]  # [n]
    lens: NDArray[np.int64]  # [n]: with the answer


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """In float32, as the engine does; as wide as x again."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)


def rotation(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of [..., head_dim / 2]."""
    d = config.head_dim
    powers = torch.arange(0, d, 2, device=positions.device, dtype=torch.float32) / d
    angles = positions[..., None].float() / config.rope_theta**powers
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [..., heads, head_dim], halves turned against each other; cos, sin: [..., 1, half]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Teacher:
    def __init__(self, checkpoint: Checkpoint, device: str) -> None:
        config = self.config = decoder_config(checkpoint)
        if config.rope_scaling is not None or config.qk_norm or config.sliding_window is not None:
            raise ModelLoadError(
                f"{checkpoint.where}: rope_scaling, q/k norms or a sliding window; heads are "
                "trained for models that have none of them"
            )
        self.device = device
        self.dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        read = {name: self._tensor(checkpoint, name) for name in checkpoint.names()}
        self.embedding = read[EMBEDDING]
        self.output = self.embedding if config.tie_word_embeddings else read[OUTPUT]
        self.last_norm = read["model.norm.weight"].float()
        self.layers = [self._layer(read, index) for index in range(config.num_layers)]

    def _tensor(self, checkpoint: Checkpoint, name: str) -> Tensor:
        values = np.array(checkpoint.read(name, "f32"))
        return torch.from_numpy(values).to(self.device, self.dtype)

    def _layer(self, read: dict[str, Tensor], index: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{index}."
        part = {name[len(prefix) :]: t for name, t in read.items() if name.startswith(prefix)}
        names = [f"self_attn.{letter}_proj" for letter in "qkv"]
        layer = {
            "attn_norm": part["input_layernorm.weight"].float(),
            "mlp_norm": part["post_attention_layernorm.weight"].float(),
            "qkv": torch.cat([part[f"{name}.weight"] for name in names]),
            "o": part["self_attn.o_proj.weight"],
            "gate_up": torch.cat([part["mlp.gate_proj.weight"], part["mlp.up_proj.weight"]]),
            "down": part["mlp.down_proj.weight"],
        }
        if self.config.attention_bias:
            layer["qkv_bias"] = torch.cat([part[f"{name}.bias"] for name in names])
        if self.config.output_bias:
            layer["o_bias"] = part["self_attn.o_proj.bias"]
        return layer

    # ---- a step --------------------------------------------------------------------------------

    def _run(
        self, tokens: Tensor, start: int, cache: Tensor | None, kept: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Tokens [batch, n] at positions from `start` on: the hidden states behind the last norm,
        and the inputs of the layers in `kept`. With a `cache`, n is 1 and keys and values go to
        [layers, 2, batch, kv heads, room, head_dim]; without, the rows are whole sequences."""
        config, (batch, n) = self.config, tokens.shape
        heads, kv_heads = config.num_heads, config.num_kv_heads
        groups = heads // kv_heads
        x = self.embedding[tokens]
        positions = torch.arange(start, start + n, device=self.device)
        cos, sin = (part[:, None] for part in rotation(positions, config))
        inputs = []
        for index, layer in enumerate(self.layers):
            if index in kept:
                inputs.append(x)
            inner = norm(x, layer["attn_norm"], config.rms_norm_eps)
            qkv = functional.linear(inner, layer["qkv"], layer.get("qkv_bias"))
            qkv = qkv.view(batch, n, -1, config.head_dim)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], 2)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
            if cache is not None:
                # The heads that share keys are rows of one attention.
                cache[index, 0, :, :, start] = k[:, 0]
                cache[index, 1, :, :, start] = v[:, 0]
                keys, values = cache[index, :, :, :, : start + 1]
                q = q.view(batch, kv_heads, groups, config.head_dim)
                mixed = functional.scaled_dot_product_attention(q, keys, values)
            else:
                q, k, v = (part.transpose(1, 2) for part in (q, k, v))
                k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
                mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                mixed = mixed.transpose(1, 2)
            mixed = mixed.reshape(batch, n, -1)
            x = x + functional.linear(mixed, layer["o"], layer.get("o_bias"))
            inner = norm(x, layer["mlp_norm"], config.rms_norm_eps)
            gate, up = functional.linear(inner, layer["gate_up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        if config.num_layers in kept:
            inputs.append(x)
        return norm(x, self.last_norm, config.rms_norm_eps), inputs

    @torch.no_grad()
    def hidden(self, tokens: Tensor, layers: Sequence[int]) -> Tensor:
        """Of whole sequences [batch, n]: the inputs of the layers, end to end; -1: the hidden
        states behind the last norm."""
        last, inputs = self._run(tokens, 0, None, layers)
        return last if tuple(layers) == (-1,) else torch.cat(inputs, -1)

    # ---- answers -------------------------------------------------------------------------------

    @torch.no_grad()
    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        new_tokens: int,
        batch: int,
        seconds: float,
        seed: int,
    ) -> Answers:
        """What follows each prompt, up to the model's end token; as many prompts, from the first
        on, as fit into the time."""
        generator = torch.Generator(self.device).manual_seed(seed)
        begin, parts = time.monotonic(), []
        longest = max(len(prompt) for prompt in prompts) + new_tokens
        for first in range(0, len(prompts), batch):
            chosen = prompts[first : first + batch]
            heat = torch.tensor(temperatures[first : first + batch], device=self.device)
            parts.append(self._answer(chosen, heat, new_tokens, longest, generator))
            if time.monotonic() - begin > seconds:
                break
        tokens, prompt_lens, lens = (np.concatenate(part) for part in zip(*parts, strict=True))
        return Answers(tokens, prompt_lens, lens)

    def _answer(
        self,
        prompts: Sequence[Sequence[int]],
        heat: Tensor,
        new_tokens: int,
        longest: int,
        generator: torch.Generator,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        config, count = self.config, len(prompts)
        lens = np.array([len(prompt) for prompt in prompts])
        given = np.zeros((count, longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            given[row, : len(prompt)] = prompt
        tokens = torch.from_numpy(given).to(self.device)
        prompt_lens = torch.from_numpy(lens).to(self.device)
        ends = prompt_lens + new_tokens
        stops = torch.tensor(config.eos_token_ids, device=self.device, dtype=torch.long)
        shape = (config.num_layers, 2, count, config.num_kv_heads, longest, config.head_dim)
        cache = torch.zeros(shape, device=self.device, dtype=self.dtype)
        is_done = torch.zeros(count, dtype=torch.bool, device=self.device)
        for position in range(longest - 1):
            # Every sequence is at the same position: in its prompt, in its answer, or done.
            last, _ = self._run(tokens[:, position : position + 1], position, cache)
            if position + 1 < lens.min():
                continue
            logits = functional.linear(last[:, 0], self.output).float()
            noise = torch.rand(logits.shape, device=self.device, generator=generator)
            gumbel = -(-noise.clamp_min(1e-20).log()).log()
            drawn = (logits + heat[:, None] * gumbel).argmax(-1)
            drawn = torch.where(position + 1 < prompt_lens, tokens[:, position + 1], drawn)
            has_ended = (position + 1 >= ends) | is_done
            tokens[:, position + 1] = torch.where(has_ended, 0, drawn)
            ends = torch.where(has_ended & ~is_done, position + 1, ends)
            is_answer = position + 1 >= prompt_lens
            is_stop = torch.isin(drawn, stops) & is_answer & ~has_ended
            ends = torch.where(is_stop, position + 2, ends)
            is_done = is_done | has_ended | is_stop
            if position % 16 == 0 and bool(is_done.all()):
                break
        ends = ends.clamp(max=longest)
        return tokens.cpu().numpy(), lens, ends.cpu().numpy()
