"""`llaisys check-model`: load a model, run a short prompt and compare the residual stream of every
layer and the logits with transformers, if it is installed."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.common.errors import LlaisysError, ModelLoadError
from llaisys.common.model_registry import get_adapter_class
from llaisys.common.step import ModelStepInput
from llaisys.models.base import AdapterOptions
from llaisys.models.families import open_checkpoint
from llaisys.models.families.model_config import ModelConfig, decoder_config
from llaisys.models.loading.checkpoint import Checkpoint, check_coverage
from llaisys.models.loading.mapped import MappedCheckpoint
from llaisys.models.loading.resolve import resolve_model
from llaisys.models.native import NativeAdapter

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Streams:
    """Values of a prompt: [tokens, hidden size] per layer boundary, and [tokens, vocabulary] of a
    decoder."""

    hidden: dict[str, Floats]
    logits: Floats | None  # None: an encoder


def check_model(
    model: str,
    say: Callable[[str], None],
    device: str = "cpu",
    dtype: str = "f32",
    n_tokens: int = 48,
    tolerance: float = 1e-3,
) -> bool:
    """Report through `say`; False when values are not finite or differ from transformers.
    `tolerance`: largest difference relative to the largest value of a row."""
    path = resolve_model(model)
    with open_checkpoint(path) as checkpoint:
        config = decoder_config(checkpoint)
        _describe(checkpoint, config, say)
        n_tokens = min(n_tokens, config.max_position_embeddings)
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, n_tokens)
        if config.encoder is not None:  # padding moves the positions of transformers
            tokens[tokens == config.encoder.first_position - 1] += 1
        own = _run(checkpoint, config, tokens, device, dtype)
    what, last = ("logits", own.logits)
    if last is None:
        what, last = ("last hidden states", own.hidden[_label(-1)])
    if not np.isfinite(last).all():
        say(f"{what}: not finite")
        return False
    say(f"{what}: finite, largest magnitude {float(np.abs(last).max()):.4g}")
    if importlib.util.find_spec("transformers") is None:
        say(f"transformers is not installed: {what} are not compared")
        return True
    try:
        reference = reference_streams(path, tokens, config.encoder is not None)
    except Exception as error:  # transformers raises all kinds for models that it cannot load
        say(f"transformers cannot load this model: {type(error).__name__}: {str(error)[:300]}")
        return True
    return _compare(own, reference, tolerance, say)


def _describe(checkpoint: Checkpoint, config: ModelConfig, say: Callable[[str], None]) -> None:
    names = check_coverage(checkpoint)
    say(f"family: {config.model_type}, {config.num_layers} layers, dtype {config.dtype}")
    used, files = set(names), checkpoint
    if isinstance(checkpoint, MappedCheckpoint):
        used, files = checkpoint.source_names(), checkpoint.inner
    unused = [name for name in files.names() if name not in used]
    shown = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
    say(
        f"tensors: {len(names)} loaded" + (f"; not used: {len(unused)} ({shown})" if unused else "")
    )


def _run(
    checkpoint: Checkpoint, config: ModelConfig, tokens: NDArray[np.int64], device: str, dtype: str
) -> Streams:
    n = len(tokens)
    adapter = get_adapter_class(config.model_type).load(
        checkpoint,
        AdapterOptions(device=device, dtype=dtype, kv_cache_layout="slot", max_model_len=max(n, 1)),
    )
    if not isinstance(adapter, NativeAdapter):
        raise ModelLoadError(f"{checkpoint.where}: this model has no hidden states to compare")
    with adapter:
        layers = [*range(config.num_layers), -1]
        adapter.capture_hidden_states(layers)
        step = ModelStepInput(
            token_ids=tokens,
            positions=np.arange(n, dtype=np.int64),
            seq_ids=np.zeros(n, np.int64),
            logits_mask=np.full(n, config.encoder is None, np.int8),
        )
        adapter.forward(step, None)
        width = config.hidden_size
        hidden = adapter.hidden_states(n).reshape(n, len(layers), width)
        by_layer = {_label(layer): hidden[:, i] for i, layer in enumerate(layers)}
        return Streams(by_layer, None if config.encoder is not None else adapter.logits())


def _label(layer: int) -> str:
    return "last norm" if layer < 0 else f"layer {layer} in"


def reference_streams(path: Path, tokens: NDArray[np.int64], is_encoder: bool = False) -> Streams:
    """The same prompt in transformers, in f32 on the CPU. Runs no code of the model's files."""
    import torch
    import transformers

    files: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if path.is_file():
        files = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    kind = transformers.AutoModel if is_encoder else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(
        **files,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
    ).eval()
    with torch.no_grad():
        out = model(torch.from_numpy(tokens[None]), output_hidden_states=True)
    states = [state[0].float().numpy() for state in out.hidden_states]
    hidden = {_label(i): state for i, state in enumerate(states[:-1])}
    hidden[_label(-1)] = states[-1]
    return Streams(hidden, None if is_encoder else out.logits[0].float().numpy())


def _compare(
    own: Streams, reference: Streams, tolerance: float, say: Callable[[str], None]
) -> bool:
    say(f"{'compared with transformers':28s} {'largest':>10s} {'relative':>10s}")
    first_bad = ""
    for name, ours in own.hidden.items():
        theirs = reference.hidden.get(name)
        if theirs is None:
            raise LlaisysError(f"transformers has no hidden state {name!r}")
        first_bad = _row(name, ours, theirs, tolerance, say) or first_bad
    if own.logits is not None and reference.logits is not None:
        first_bad = _row("logits", own.logits, reference.logits, tolerance, say) or first_bad
        same = float(np.mean(own.logits.argmax(-1) == reference.logits.argmax(-1)))
        say(f"same most likely token: {100 * same:.1f} % of {len(own.logits)} positions")
    say("result: " + ("differs" if first_bad else "equal within the tolerance"))
    return not first_bad


def _row(
    name: str, ours: Floats, theirs: Floats, tolerance: float, say: Callable[[str], None]
) -> str:
    """Print a line; the name if the values differ."""
    if ours.shape != theirs.shape:
        say(f"{name:28s} shape {ours.shape}, transformers {theirs.shape}")
        return name
    largest = float(np.abs(ours - theirs).max())
    relative = largest / max(float(np.abs(theirs).max()), 1e-30)
    differs = not relative <= tolerance
    say(f"{name:28s} {largest:10.3g} {relative:10.3g}" + ("  differs" if differs else ""))
    return name if differs else ""
