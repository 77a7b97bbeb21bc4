"""The same answers, bit for bit, from a real decoder with each proposer as with none: tokens, text,
log-probabilities, ends. `LLAISYS_TEST_REQUESTS=1000` runs the whole check
(results: docs/guides/speculative_decoding.md)."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_heads import head_tensors, write_head
from model_files import tiny_config, tiny_weights, write_hf_model
from speculation import Run, answers, random_requests, run

COUNT = int(os.environ.get("LLAISYS_TEST_REQUESTS", "20"))  # requests, at least, per proposer
VOCAB, HIDDEN = 259, 32
CONFIG = tiny_config(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=40)
METHODS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")


def speaking_weights(seed: int, layers: float) -> dict[str, Any]:
    """A model that repeats a cycle of tokens: the output row of a token is the embedding of its
    predecessor, and the layers add noise."""
    weights = tiny_weights(CONFIG, seed)
    table, after = cycle()
    for name, values in weights.items():
        if ".layers." in name and "norm" not in name:
            weights[name] = values * np.float32(layers)
    weights["model.embed_tokens.weight"] = table
    weights["lm_head.weight"] = table[np.argsort(after)] * np.float32(0.35)
    return weights


@cache
def cycle() -> tuple[Any, Any]:
    """(embeddings [VOCAB, HIDDEN], the token after each)"""
    rng = np.random.default_rng(11)
    table = rng.standard_normal((VOCAB, HIDDEN), dtype=np.float32)
    order = np.arange(VOCAB)
    after = order.copy()
    for first in range(0, VOCAB, 7):
        after[first : first + 7] = np.roll(order[first : first + 7], -1)
    return table, after


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model, a smaller one that mostly agrees with it, and heads with its cycles."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("model", *METHODS)}
    weights = speaking_weights(1, 0.5)
    write_hf_model(found["model"], CONFIG, weights=weights)
    write_hf_model(found["draft_model"], CONFIG, weights=speaking_weights(2, 0.1))
    for kind in ("eagle", "eagle3", "mtp"):
        tensors = head_tensors(kind, CONFIG)
        for name, values in tensors.items():
            if "norm" not in name:
                tensors[name] = values * np.float32(0.2)
        if kind == "eagle3":  # its residual is the hidden state: it attends to the token
            continue_with_token(tensors)
        else:
            fuse = "fc.weight" if kind == "eagle" else "model.mtp_layers.0.input_proj.weight"
            token = 0 if kind == "eagle" else HIDDEN
            tensors[fuse][:, token : token + HIDDEN] += 2 * np.eye(HIDDEN, dtype=np.float32)
        layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
        write_head(found[kind], {**CONFIG, **layers}, tensors)
    return found


def continue_with_token(tensors: dict[str, Any]) -> None:
    """The MLP is as good as off; values are the token's, and come out as they went in."""
    half = HIDDEN // 2
    tensors["fc.weight"] *= np.float32(0.05)
    value, out = (
        tensors["midlayer.self_attn.v_proj.weight"],
        tensors["midlayer.self_attn.o_proj.weight"],
    )
    value[:, :half] += 5 * np.eye(half, dtype=np.float32)
    size = HIDDEN // CONFIG["num_attention_heads"]
    groups = CONFIG["num_attention_heads"] // CONFIG["num_key_value_heads"]
    for row in range(half):  # the first of the heads that share a value
        out[row, (row // size) * groups * size + row % size] += 5


@cache
def plain_run(model: str, seed: int) -> Run:
    return run(random_requests(seed, VOCAB), settings_of(model))


def settings_of(model: str) -> dict[str, Any]:
    return {"model": model, "adapter_class": None, "max_num_seqs": 48, "n_threads": 1}


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_bitwise_identical_with_every_proposer(
    files: dict[str, Path], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "llaisys.engine.worker.drafting.head.MIN_PROBABILITY", 0.0
    )  # as long as they may be
    drafts = {"num_speculative_tokens": 5, "disable_by_batch_size": 1000, "method": method}
    if method != "ngram":
        drafts |= {"model": str(files[method]), "prompt_lookup_max": 64}
    model, accepted, refused, seed, count = str(files["model"]), 0, 0, 0, 0
    while count < COUNT:
        requests = random_requests(seed, VOCAB)
        plain = plain_run(model, seed)
        drafted = run(requests, settings_of(model), speculative=drafts)
        assert answers(drafted.outputs) == answers(plain.outputs), f"seed {seed}"
        accepted += drafted.stats["spec_decode_num_accepted_tokens"]
        refused += drafted.stats["spec_decode_num_draft_tokens"]
        count += len(requests)
        seed += 1
    refused -= accepted
    print(f"{method}: {count} requests, {accepted} drafts accepted, {refused} refused")
    assert accepted > 2 and refused > 5
