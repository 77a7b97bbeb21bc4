"""The target model in torch, whose hidden states train the head. Weights are read by the engine's
loaders."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from llaisys.common.errors import ModelLoadError
from llaisys.models.families.decoder_tensors import EMBEDDING, OUTPUT
from llaisys.models.families.model_config import ModelConfig, decoder_config
from llaisys.models.loading.checkpoint import Checkpoint

# (layer, q, k, v of [batch, n, heads, head_dim]) -> [batch, n, heads * head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm in float32, as in the engine; the result has the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)


def rotation(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin, [positions, 1, head_dim / 2]."""
    d = config.head_dim
    powers = torch.arange(0, d, 2, device=positions.device, dtype=torch.float32) / d
    angles = positions[:, None, None].float() / config.rope_theta**powers
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (rotate-half) of x [..., n, heads, head_dim]; cos, sin: [n, 1, half]."""
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
        self.device, self.is_cuda = device, device.startswith("cuda")
        self.dtype = torch.bfloat16 if self.is_cuda else torch.float32
        read = {name: self._tensor(checkpoint, name) for name in checkpoint.names()}
        self.embedding = read[EMBEDDING]
        self.output = self.embedding if config.tie_word_embeddings else read[OUTPUT]
        self.last_norm = read["model.norm.weight"]
        self.layers = [self._layer(read, index) for index in range(config.num_layers)]

    def _tensor(self, checkpoint: Checkpoint, name: str) -> Tensor:
        values = np.array(checkpoint.read(name, "f32"))
        return torch.from_numpy(values).to(self.device, self.dtype)

    def _layer(self, read: dict[str, Tensor], index: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{index}."
        part = {name[len(prefix) :]: t for name, t in read.items() if name.startswith(prefix)}
        names = [f"self_attn.{letter}_proj" for letter in "qkv"]
        layer = {
            "attn_norm": part["input_layernorm.weight"],
            "mlp_norm": part["post_attention_layernorm.weight"],
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

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def run(
        self, tokens: Tensor, cos: Tensor, sin: Tensor, attend: Attend, kept: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states of tokens [batch, n] after the last norm, and the inputs of the layers in
        `kept`. cos, sin: of the n positions."""
        config, (batch, n) = self.config, tokens.shape
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        x = self.embedding[tokens]
        inputs = []
        for index, layer in enumerate(self.layers):
            if index in kept:
                inputs.append(x)
            inner = self.normed(x, layer["attn_norm"])
            qkv = functional.linear(inner, layer["qkv"], layer.get("qkv_bias"))
            q, k, v = qkv.view(batch, n, -1, config.head_dim).split(heads, 2)
            mixed = attend(index, rotated(q, cos, sin), rotated(k, cos, sin), v)
            x = x + functional.linear(mixed, layer["o"], layer.get("o_bias"))
            gate, up = functional.linear(self.normed(x, layer["mlp_norm"]), layer["gate_up"]).chunk(
                2, -1
            )
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        if config.num_layers in kept:
            inputs.append(x)
        return self.normed(x, self.last_norm), inputs

    @torch.no_grad()
    def hidden(self, tokens: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """For sequences [batch, n]: hidden states after the last norm, and the concatenated inputs
        of `layers`, where -1 is the former."""
        config, (batch, n) = self.config, tokens.shape
        groups = config.num_heads // config.num_kv_heads

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return mixed.transpose(1, 2).reshape(batch, n, -1)

        cos, sin = rotation(torch.arange(n, device=self.device), config)
        last, inputs = self.run(tokens, cos, sin, attend, layers)
        return last, last if tuple(layers) == (-1,) else torch.cat(inputs, -1)
