"""A draft head in torch with the published parameter names, and its export.

Row r of a sequence: the model's hidden state of token r and token r + 1, to predict token r + 2. A
chain of drafts is trained as it is used: draft j > 1 uses the head's hidden state instead of the
model's, and attends to the true rows before the chain and to the chain.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from draft_training.teacher import norm, rotated, rotation
from llaisys.models.families.model_config import ModelConfig

PREFIXES = {"eagle": "layers.0.", "eagle3": "midlayer.", "mtp": "model.mtp_layers.0."}


class Head(nn.Module):
    """`scale`: magnitude of each hidden state feature, `token_scale`: of embeddings. fc is trained
    on normalized inputs, and the scales are folded into it when it is written. `last_norm`: weight
    of the model's last norm, the initial value of the head's."""

    scale: Tensor

    def __init__(
        self,
        kind: str,
        config: ModelConfig,
        inner: int,
        scale: Tensor,
        token_scale: float,
        last_norm: Tensor,
    ) -> None:
        super().__init__()
        self.token_scale = token_scale
        self.kind, self.config, self.inner = kind, config, inner
        hidden, d = config.hidden_size, config.head_dim
        prefix, wide = PREFIXES[kind], hidden * (2 if kind == "eagle3" else 1)
        self.prefix = prefix
        self.register_buffer("scale", scale.float(), persistent=False)
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (config.num_heads * d, wide),
            "self_attn.k_proj.weight": (config.num_kv_heads * d, wide),
            "self_attn.v_proj.weight": (config.num_kv_heads * d, wide),
            "self_attn.o_proj.weight": (hidden, config.num_heads * d),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "post_attention_layernorm.weight": (hidden,),
        }
        if kind == "mtp":
            names = ("token", "hidden", "input", "final")
            shapes |= {f"{name}_layernorm.weight": (hidden,) for name in names}
            shapes["input_proj.weight"] = (hidden, 2 * hidden)
        elif kind == "eagle3":
            shapes |= {"input_layernorm.weight": (hidden,), "hidden_norm.weight": (hidden,)}
        shapes = {prefix + name: shape for name, shape in shapes.items()}
        if kind == "eagle":
            shapes["fc.weight"] = (hidden, 2 * hidden)
        elif kind == "eagle3":
            shapes |= {"fc.weight": (hidden, len(scale)), "norm.weight": (hidden,)}
        self.values = nn.ParameterDict()
        for name, shape in shapes.items():
            value = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value *= 0.1  # the layer starts near the identity
            elif name in (f"{prefix}final_layernorm.weight", "norm.weight"):
                value = last_norm.to("cpu", torch.float32, copy=True)
            elif kind == "eagle" and name == "fc.weight":  # initially passes the hidden state
                value[:, hidden:] = torch.diag(scale.to("cpu", torch.float32))
            self.values[name.replace(".", "/")] = nn.Parameter(value)

    def get(self, name: str) -> Tensor:
        weight: Tensor = self.values[f"{name}.weight".replace(".", "/")]
        return weight

    def layer(self, name: str) -> Tensor:
        return self.get(f"{self.prefix}{name}")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.get(name), self.config.rms_norm_eps)

    # ---- a chain of drafts ---------------------------------------------------------------------

    def forward(
        self, embedded: Tensor, features: Tensor, depth: int, output: Tensor
    ) -> list[Tensor]:
        """Logits of drafts 1 .. depth for each row: [batch, n, hidden], [batch, n, features] ->
        depth times [batch, n, draft vocabulary]. Row r of draft j predicts token r + 2, given that
        the earlier drafts are the true tokens. The first j - 1 rows of draft j are invalid.
        `output`: rows of the model's output matrix for the draft vocabulary."""
        chain: list[tuple[Tensor, Tensor]] = []  # keys and values per draft
        own: Tensor | None = None
        drafts = []
        for _ in range(depth):
            if own is not None:  # row r uses the output of draft j - 1 for row r - 1
                own = functional.pad(own, (0, 0, 1, -1))
            residual, inner = self._fused(embedded, features, own)
            x = residual + self._attention(inner, chain)
            inner = self._norm(x, f"{self.prefix}post_attention_layernorm")
            gate = functional.silu(functional.linear(inner, self.layer("mlp.gate_proj")))
            up = functional.linear(inner, self.layer("mlp.up_proj"))
            x = x + functional.linear(gate * up, self.layer("mlp.down_proj"))
            own = x
            if self.kind == "mtp":
                own = x = self._norm(x, f"{self.prefix}final_layernorm")
            elif self.kind == "eagle3":
                x = self._norm(x, "norm")
            drafts.append(functional.linear(x, output))
        return drafts

    def _fused(
        self, embedded: Tensor, features: Tensor, own: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(residual, attention input) of tokens and hidden states, the model's or its `own`."""
        if self.kind == "eagle":
            given = (features if own is None else own) * self.scale.reciprocal()
            token = embedded / self.token_scale
            x = functional.linear(torch.cat([token, given.to(token.dtype)], -1), self.get("fc"))
            return x, x
        if self.kind == "mtp":
            hidden = self._norm(features if own is None else own, f"{self.prefix}hidden_layernorm")
            token = self._norm(embedded, f"{self.prefix}token_layernorm")
            x = functional.linear(torch.cat([hidden, token], -1), self.layer("input_proj"))
            return x, self._norm(x, f"{self.prefix}input_layernorm")
        if own is None:
            own = functional.linear(
                (features * self.scale.reciprocal()).to(embedded.dtype), self.get("fc")
            )
        token = self._norm(embedded, f"{self.prefix}input_layernorm")
        hidden = self._norm(own, f"{self.prefix}hidden_norm")
        return own, torch.cat([token, hidden], -1)

    def _attention(self, inner: Tensor, chain: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Attention of one draft; appends its keys and values to the chain."""
        config, (batch, n, _) = self.config, inner.shape
        q, k, v = (
            functional.linear(inner, self.layer(f"self_attn.{letter}_proj")).view(
                batch, n, -1, config.head_dim
            )
            for letter in "qkv"
        )
        cos, sin = rotation(torch.arange(n, device=inner.device), config)
        groups = config.num_heads // config.num_kv_heads
        q, k = rotated(q, cos, sin).transpose(1, 2), rotated(k, cos, sin).transpose(1, 2)
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v.transpose(1, 2)))
        chain.append((k, v))
        depth = len(chain)
        if depth == 1:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            # True rows up to r - (depth - 1), then one row of each earlier draft and of this one.
            first, values = chain[0]
            scores = q @ first.transpose(-1, -2)
            mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril(1 - depth)
            scores = scores.masked_fill(~mask, -1e9)
            late = [self._shifted(pair, depth - 1 - i) for i, pair in enumerate(chain[1:], 1)]
            diagonal = torch.stack([(q * key).sum(-1) for key, _ in late], -1)
            weights = torch.cat([scores, diagonal], -1).float() * config.head_dim**-0.5
            weights = weights.softmax(-1).to(v.dtype)
            mixed = weights[..., :n] @ values
            for i, (_, value) in enumerate(late):
                mixed = mixed + weights[..., n + i : n + i + 1] * value
        mixed = mixed.transpose(1, 2).reshape(batch, n, -1)
        return functional.linear(mixed, self.layer("self_attn.o_proj"))

    @staticmethod
    def _shifted(pair: tuple[Tensor, Tensor], rows: int) -> tuple[Tensor, Tensor]:
        """Shift by `rows`: row r becomes the old row r - `rows`."""
        key, value = (functional.pad(x, (0, 0, rows, -rows)) if rows else x for x in pair)
        return key, value

    # ---- files ---------------------------------------------------------------------------------

    def write(
        self, directory: Path, token_ids: NDArray[np.int64], layers: Sequence[int], card: str
    ) -> int:
        """Write model.safetensors (f16), config.json and README.md; returns the size of the first.
        d2t selects the rows of the model's output matrix."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {name.replace("/", "."): value.data for name, value in self.values.items()}
        if self.kind != "mtp":
            fc = tensors["fc.weight"].clone()
            fc[:, -len(self.scale) :] /= self.scale
            if self.kind == "eagle":
                fc[:, : -len(self.scale)] /= self.token_scale
            tensors["fc.weight"] = fc
        tensors = {
            name: value.to("cpu", torch.float16).contiguous() for name, value in tensors.items()
        }
        tensors["d2t"] = torch.from_numpy(token_ids - np.arange(len(token_ids)))
        save_file(tensors, directory / "model.safetensors")
        config = self.config
        values = {
            "architectures": [f"{self.kind.capitalize()}DraftHead"],
            "model_type": "llama",
            "hidden_size": config.hidden_size,
            "num_hidden_layers": 1,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "intermediate_size": self.inner,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope_theta,
            "max_position_embeddings": config.max_position_embeddings,
            "vocab_size": config.vocab_size,
            "draft_vocab_size": len(token_ids),
            "torch_dtype": "float16",
        }
        if self.kind == "eagle3":
            values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layers)}
        (directory / "config.json").write_text(json.dumps(values, indent=1) + "\n")
        (directory / "README.md").write_text(card)
        return (directory / "model.safetensors").stat().st_size
