"""`llaisys bench perplexity`: perplexity of a text, and KL divergence from a reference model.

The text is split into chunks of `context` tokens, each computed from an empty cache; the tokens of
the second half are scored, as in llama.cpp's llama-perplexity, so that the results are comparable.
"""

import math
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys.bench.latency import model_options
from llaisys.common.errors import InvalidInputError
from llaisys.common.model_registry import get_adapter_class
from llaisys.common.progress import report
from llaisys.common.step import ModelStepInput
from llaisys.common.validation import invalid_count, invalid_value
from llaisys.engine.config import EngineConfig
from llaisys.engine.executor.device_choice import resolve_device
from llaisys.models.base import AdapterOptions, ModelAdapter
from llaisys.models.families import open_checkpoint
from llaisys.models.loading.resolve import DEFAULT_MODEL, resolve_model
from llaisys.tokenization import Tokenizer

STEP_TOKENS = 32  # scored tokens per step; bounds the memory of the logits
Rows = NDArray[np.float64]  # log-probabilities [tokens, vocabulary]


@dataclass(slots=True)
class Score:
    """Sums over the scored tokens."""

    tokens: int = 0
    loss: float = 0.0  # of the model, in nats
    squares: float = 0.0
    reference_loss: float = 0.0
    divergence: float = 0.0  # KL divergence from the reference
    agreements: int = 0  # tokens with the same argmax

    def add(self, rows: Rows, expected: NDArray[np.int64], reference: Rows | None) -> None:
        each = np.arange(len(expected))
        losses = -rows[each, expected]
        self.tokens += len(expected)
        self.loss += float(losses.sum())
        self.squares += float((losses**2).sum())
        if reference is not None:
            self.reference_loss -= float(reference[each, expected].sum())
            self.divergence += float((np.exp(reference) * (reference - rows)).sum())
            self.agreements += int((reference.argmax(1) == rows.argmax(1)).sum())

    def report(self, has_reference: bool) -> dict[str, Any]:
        mean = self.loss / self.tokens
        spread = math.sqrt(max(self.squares / self.tokens - mean**2, 0) / self.tokens)
        result: dict[str, Any] = {
            "tokens_scored": self.tokens,
            "perplexity": round(math.exp(mean), 4),
            "plus_minus": round(math.exp(mean) * spread, 4),  # one standard error
        }
        if has_reference:
            result |= {
                "reference_perplexity": round(math.exp(self.reference_loss / self.tokens), 4),
                "kl_divergence": round(self.divergence / self.tokens, 6),
                "top1_agreement": round(self.agreements / self.tokens, 4),
            }
        return result


def run_perplexity(
    file: Path,
    engine: EngineConfig,
    reference: str | None = None,
    reference_dtype: str | None = None,
    context: int = 512,
    chunks: int = 0,
) -> dict[str, Any]:
    """Only the model options of `engine` are used. `reference`: a model, None: the same one;
    `reference_dtype`: its compute dtype. Both None: no reference. `chunks`: 0: the whole text."""
    engine = resolve_device(engine)
    model = engine.model or DEFAULT_MODEL
    has_reference = reference is not None or reference_dtype is not None
    with ExitStack() as stack:
        keep = stack.enter_context
        own = AdapterOptions(**model_options(engine), kv_cache_layout="slot", max_model_len=context)
        encoder, adapter = _load(model, engine.revision, own)
        models = [keep(closing(adapter))]
        if has_reference:
            dtype = reference_dtype or "f32"
            plain = replace(own, dtype=dtype, quantization=None, kv_cache_dtype="auto")
            compared = (model, engine.revision) if reference is None else (reference, None)
            models.append(keep(closing(_load(*compared, plain)[1])))
            if models[1].vocab_size != models[0].vocab_size:
                raise invalid_count(
                    *("reference", models[1].vocab_size, "tokens in its vocabulary"),
                    f"those of the model, {models[0].vocab_size}",
                )
        found = cut(encoder, _read(file), context)[: chunks or None]
        if not len(found):
            limit = f"a text of at least {context} tokens, one chunk of --context"
            raise invalid_value("file", str(file), limit)
        score = Score()
        for done, chunk in enumerate(found, 1):
            for start, stop in steps_of(len(chunk)):
                rows = [read_tokens(adapter, chunk, start, stop) for adapter in models]
                if start > 0:
                    score.add(rows[0], chunk[start + 1 : stop + 1], rows[1] if rows[1:] else None)
            for adapter in models:
                adapter.native.call("KvSeqRm", 0, 0, -1)  # type: ignore[attr-defined]
            perplexity = math.exp(score.loss / score.tokens)
            report(f"perplexity {perplexity:.4f}", done, len(found))
    about = {"model": model, "context": context, "chunks": len(found)}
    return about | score.report(has_reference)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"--file {file}: {error}", field="file", value=str(file), limit="a text in UTF-8"
        ) from error


def _load(
    model: str, revision: str | None, options: AdapterOptions
) -> tuple[Tokenizer, ModelAdapter]:
    with open_checkpoint(resolve_model(model, revision=revision)) as checkpoint:
        encoder = Tokenizer.from_source(checkpoint.tokenizer_source)
        family = get_adapter_class(checkpoint.config.model_type)
        return encoder, family.load(checkpoint, options)


def cut(encoder: Tokenizer, text: str, context: int) -> NDArray[np.int64]:
    """Chunks [n, context] of the text's tokens; each begins with the BOS token, if the model has
    one."""
    first = encoder.encode("", add_special_tokens=True)
    ids = np.asarray(encoder.encode(text, add_special_tokens=True), np.int64)
    chunks = ids[: len(ids) // context * context].reshape(-1, context).copy()
    if first:
        chunks[:, 0] = first[0]
    return chunks


def steps_of(context: int) -> list[tuple[int, int]]:
    """[start, stop) of the steps over a chunk: the first half in one step, then scored tokens."""
    half = context // 2
    bounds = [0, *range(half, context - 1, STEP_TOKENS), context - 1]
    return list(pairwise(bounds))


def read_tokens(adapter: ModelAdapter, chunk: NDArray[np.int64], start: int, stop: int) -> Rows:
    """Log-probabilities after tokens [start, stop) of a chunk; for the first step only after its
    last token."""
    n = stop - start
    is_output = np.full(n, start > 0, np.int8)
    is_output[-1] = 1  # a step needs an output
    tokens, positions = chunk[start:stop].copy(), np.arange(start, stop, dtype=np.int64)
    adapter.forward(ModelStepInput(tokens, positions, np.zeros(n, np.int64), is_output), None)
    return _log_softmax(adapter.logits())


def _log_softmax(logits: NDArray[np.float32]) -> Rows:
    rows = logits.astype(np.float64)
    rows -= rows.max(1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(1, keepdims=True))
    return rows
