#!/usr/bin/env python3
"""Train a head that drafts for a model, on what the model itself says.

    scripts/train_draft_head.py --out heads/eagle                 the default model, an EAGLE head
    scripts/train_draft_head.py --kind mtp --device cuda --out heads/mtp

The model answers prompts, and its hidden states are kept (llaisysModelKeepHidden); then a layer is
trained in torch to say what the model said next. Needs torch. Written are model.safetensors and
config.json, which `--speculative-config '{"method": "eagle", "model": "heads/eagle"}'` opens, and
README.md, which says what the head was trained on. docs/speculative.md has the recipe.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from llaisys import LLM, SamplingParams
from llaisys.common.model_registry import get_adapter_class
from llaisys.common.step import ModelStepInput
from llaisys.models.base import AdapterOptions
from llaisys.models.families import open_checkpoint
from llaisys.models.families.decoder_tensors import EMBEDDING, OUTPUT
from llaisys.models.families.model_config import ModelConfig, decoder_config
from llaisys.models.loading.resolve import DEFAULT_MODEL, resolve_model

TOPICS = (
    *("the sea", "bread", "trains", "a garden in spring", "prime numbers", "old maps", "sleep"),
    *("a small company's budget", "rivers", "chess", "the moon", "recycling", "bicycles", "rain"),
    *("Python lists", "a birthday party", "volcanoes", "learning a language", "bees", "music"),
)
TASKS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "What are the pros and cons of {}?",
    "Write an e-mail to a friend about {}.",
    "Summarise what matters about {} in three sentences.",
)


@dataclass(frozen=True)
class Sample:
    """One conversation: what the model read and said."""

    tokens: NDArray[np.int64]  # [n]
    features: NDArray[np.float32]  # [n, hidden size]: after the last norm


# ---- what the model says -------------------------------------------------------------------------


def collect(model: str | None, prompts: Sequence[str], new_tokens: int, seed: int) -> list[Sample]:
    """Answers to the prompts, half of them greedy, and their hidden states."""
    with LLM(model, seed=seed) as llm:
        prompt_ids = [llm.encode_chat([{"role": "user", "content": text}]) for text in prompts]
        params = [
            SamplingParams(max_tokens=new_tokens, temperature=0.0 if index % 2 else 0.8)
            for index in range(len(prompts))
        ]
        outputs = llm.generate(prompt_ids, params, use_tqdm=False)
    sequences = [
        [*ids, *output.outputs[0].token_ids]
        for ids, output in zip(prompt_ids, outputs, strict=True)
    ]
    return keep_features(model, sequences)


def keep_features(model: str | None, sequences: Sequence[Sequence[int]]) -> list[Sample]:
    longest = max(len(tokens) for tokens in sequences)
    with open_checkpoint(resolve_model(model or DEFAULT_MODEL)) as checkpoint:
        adapter_class = get_adapter_class(checkpoint.config.model_type)
        options = AdapterOptions(kv_cache_layout="slot", kv_cache_capacity_tokens=longest)
        adapter = adapter_class.load(checkpoint, options)
    samples = []
    with adapter:
        adapter.keep_hidden((-1,))
        for tokens in sequences:
            n = len(tokens)
            ids = np.array(tokens, dtype=np.int64)
            zeros, mask = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int8)
            mask[-1] = 1
            adapter.forward(ModelStepInput(ids, np.arange(n), zeros, mask), None)
            samples.append(Sample(ids, adapter.hidden(n)))
            adapter.native.kv_seq_rm(0, -1, -1)  # type: ignore[attr-defined]
    return samples


def frequent_tokens(samples: Sequence[Sample], count: int) -> NDArray[np.int64]:
    """The `count` that occur most, rising; the lowest ids where there are not so many."""
    counts = Counter(int(t) for sample in samples for t in sample.tokens)
    chosen = [token for token, _ in counts.most_common(count)]
    token = 0
    while len(chosen) < count:
        if token not in counts:
            chosen.append(token)
        token += 1
    return np.sort(np.array(chosen, dtype=np.int64))


# ---- the head ------------------------------------------------------------------------------------


class Head(nn.Module):
    """An EAGLE head or an MTP layer, its parameters under their published names."""

    def __init__(self, kind: str, config: ModelConfig, inner: int, output: Tensor) -> None:
        """`output`: rows of the model's own head, [draft vocabulary, hidden size]."""
        super().__init__()
        self.kind, self.config = kind, config
        hidden, d = config.hidden_size, config.head_dim
        prefix = "layers.0." if kind == "eagle" else "model.mtp_layers.0."
        self.prefix = prefix
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (config.num_heads * d, hidden),
            "self_attn.k_proj.weight": (config.num_kv_heads * d, hidden),
            "self_attn.v_proj.weight": (config.num_kv_heads * d, hidden),
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
        self.values = nn.ParameterDict()
        for name, shape in shapes.items():
            weight = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.02
            self._add(prefix + name, weight)
        if kind == "eagle":
            # The feature passes through at first: the layer learns what the next one differs by.
            self._add("fc.weight", torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1))
        self._add("lm_head.weight", output)

    def _add(self, name: str, value: Tensor) -> None:
        self.values[name.replace(".", "/")] = nn.Parameter(value.clone())

    def get(self, name: str) -> Tensor:
        return self.values[name.replace(".", "/")]

    def layer(self, name: str) -> Tensor:
        return self.get(f"{self.prefix}{name}.weight")

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * self.layer(name)

    def forward(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, hidden states) of [batch, n, hidden size] each."""
        if self.kind == "eagle":
            x = torch.cat([embedded, features], -1) @ self.get("fc.weight").T
            inner = x
        else:
            token, hidden = (
                self.norm(embedded, "token_layernorm"),
                self.norm(features, "hidden_layernorm"),
            )
            x = torch.cat([hidden, token], -1) @ self.layer("input_proj").T
            inner = self.norm(x, "input_layernorm")
        x = x + self.attention(inner)
        inner = self.norm(x, "post_attention_layernorm")
        gate = functional.silu(inner @ self.layer("mlp.gate_proj").T)
        x = x + (gate * (inner @ self.layer("mlp.up_proj").T)) @ self.layer("mlp.down_proj").T
        if self.kind == "mtp":
            x = self.norm(x, "final_layernorm")
        return x @ self.get("lm_head.weight").T, x

    def attention(self, x: Tensor) -> Tensor:
        config, (batch, n, _) = self.config, x.shape
        q, k, v = (
            (x @ self.layer(f"self_attn.{letter}_proj").T).view(batch, n, -1, config.head_dim)
            for letter in "qkv"
        )
        groups = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        q, k, v = (part.transpose(1, 2) for part in (self.rotated(q), self.rotated(k), v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, n, -1) @ self.layer("self_attn.o_proj").T

    def rotated(self, x: Tensor) -> Tensor:
        d = self.config.head_dim
        powers = torch.arange(0, d, 2, device=x.device) / d
        angles = torch.arange(x.shape[1], device=x.device)[:, None] / self.config.rope_theta**powers
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


# ---- training ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    steps: int
    batch: int
    length: int  # rows of a sample in a step
    rate: float
    seed: int
    regression: float = 0.1  # weight of the hidden states' error, of an EAGLE head


def train(
    head: Head,
    embedding: Tensor,
    samples: Sequence[Sample],
    token_ids: NDArray[np.int64],
    recipe: Recipe,
    device: str,
    show: Callable[[str], None] = print,
) -> list[float]:
    """The loss of every step. Row p: feature p and token p + 1, to say token p + 2; tokens that the
    head cannot draft do not count."""
    head.to(device).train()
    rank = torch.full((len(embedding),), -100, dtype=torch.long)  # cross_entropy leaves -100 out
    rank[torch.from_numpy(token_ids)] = torch.arange(len(token_ids))
    optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.rate, total_steps=recipe.steps)
    rng = np.random.default_rng(recipe.seed)
    usable = [sample for sample in samples if len(sample.tokens) >= 4]
    losses, begin = [], time.monotonic()
    for step in range(recipe.steps):
        chosen = [usable[i] for i in rng.integers(0, len(usable), recipe.batch)]
        rows = min(recipe.length, *(len(sample.tokens) - 2 for sample in chosen))
        starts = [int(rng.integers(0, len(sample.tokens) - 1 - rows)) for sample in chosen]
        pieces = list(zip(chosen, starts, strict=True))
        tokens = torch.from_numpy(np.stack([s.tokens[a + 1 : a + rows + 2] for s, a in pieces]))
        features = torch.from_numpy(np.stack([s.features[a : a + rows + 1] for s, a in pieces]))
        features = features.to(device)
        embedded = embedding[tokens[:, :-1]].to(device)
        wanted = rank[tokens[:, 1:]].to(device)
        noise = 0.05 * features.std() * torch.randn_like(features[:, :-1])
        logits, hidden = head(embedded, features[:, :-1] + noise)
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        if head.kind == "eagle":  # further drafts take its hidden states for features
            loss = loss + recipe.regression * functional.smooth_l1_loss(hidden, features[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % max(1, recipe.steps // 20) == 0 or step == recipe.steps - 1:
            seconds = time.monotonic() - begin
            show(f"step {step + 1} of {recipe.steps}: loss {losses[-1]:.3f}, {seconds:.0f} s")
    return losses


# ---- files ---------------------------------------------------------------------------------------


def write(
    directory: Path, head: Head, inner: int, token_ids: NDArray[np.int64], vocab: int, card: str
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    values = head.state_dict()
    tensors = {
        name.removeprefix("values.").replace("/", "."): value.to("cpu", torch.float16).contiguous()
        for name, value in values.items()
    }
    tensors["d2t"] = torch.from_numpy(token_ids - np.arange(len(token_ids)))
    save_file(tensors, directory / "model.safetensors")
    config = head.config
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["EagleLlamaForCausalLM" if head.kind == "eagle" else "MtpLayer"],
                "model_type": "llama",
                "hidden_size": config.hidden_size,
                "num_hidden_layers": 1,
                "num_attention_heads": config.num_heads,
                "num_key_value_heads": config.num_kv_heads,
                "head_dim": config.head_dim,
                "intermediate_size": inner,
                "rms_norm_eps": config.rms_norm_eps,
                "rope_theta": config.rope_theta,
                "max_position_embeddings": config.max_position_embeddings,
                "vocab_size": vocab,
                "draft_vocab_size": len(token_ids),
                "torch_dtype": "float16",
            },
            indent=1,
        )
        + "\n"
    )
    (directory / "README.md").write_text(card)


def card_of(options: argparse.Namespace, samples: Sequence[Sample], losses: list[float]) -> str:
    tokens = sum(len(sample.tokens) for sample in samples)
    source = "its own list of tasks and topics" if options.prompts is None else options.prompts.name
    return (
        f"# A {options.kind} head for {options.model or DEFAULT_MODEL}\n\n"
        f"Drafts tokens for that model and no other. Trained by `scripts/train_draft_head.py` on "
        f"what the model itself answered to {len(samples)} prompts ({source}), {tokens} tokens; no "
        "other text was used.\n\n"
        f"- steps {options.steps}, batch {options.batch}, rows {options.length}, learning rate "
        f"{options.rate}, seed {options.seed}\n"
        f"- drafts from {options.draft_vocab} tokens; intermediate size {options.intermediate}\n"
        f"- loss: first {losses[0]:.3f}, last {losses[-1]:.3f}\n"
    )


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="directory, GGUF file or hub name; else the default model")
    parser.add_argument("--kind", choices=["eagle", "mtp"], default="eagle")
    parser.add_argument("--out", type=Path, required=True, help="directory of the head")
    parser.add_argument("--prompts", type=Path, help="a text file, one prompt a line")
    parser.add_argument("--count", type=int, default=120, help="prompts of the built-in list")
    parser.add_argument("--new-tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="rows of a sample in a step")
    parser.add_argument("--rate", type=float, default=1e-3, help="the highest learning rate")
    parser.add_argument("--draft-vocab", type=int, default=2048, help="tokens that it can draft")
    parser.add_argument("--intermediate", type=int, default=640, help="size of the MLP")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)

    if options.prompts is not None:
        prompts = [line for line in options.prompts.read_text().splitlines() if line.strip()]
    else:
        prompts = [task.format(topic) for topic in TOPICS for task in TASKS][: options.count]
    samples = collect(options.model, prompts, options.new_tokens, options.seed)
    print(f"{len(samples)} answers, {sum(len(s.tokens) for s in samples)} tokens")
    with open_checkpoint(resolve_model(options.model or DEFAULT_MODEL)) as checkpoint:
        config = decoder_config(checkpoint)
        embedding = torch.from_numpy(np.array(checkpoint.read(EMBEDDING, "f32")))
        output = embedding
        if not config.tie_word_embeddings:
            output = torch.from_numpy(np.array(checkpoint.read(OUTPUT, "f32")))
    token_ids = frequent_tokens(samples, min(options.draft_vocab, config.vocab_size))
    head = Head(options.kind, config, options.intermediate, output[torch.from_numpy(token_ids)])
    recipe = Recipe(options.steps, options.batch, options.length, options.rate, options.seed)
    losses = train(head, embedding, samples, token_ids, recipe, options.device)
    card = card_of(options, samples, losses)
    write(options.out, head, options.intermediate, token_ids, config.vocab_size, card)
    size = (options.out / "model.safetensors").stat().st_size
    print(f"{options.out}: {size / 1e6:.1f} MB")
    return losses


if __name__ == "__main__":
    main()
