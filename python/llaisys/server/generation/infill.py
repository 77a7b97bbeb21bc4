"""Prompts for the text between a beginning and an end, in the marks of the model (fill in the
middle), with other texts of the same project before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llaisys.common.sampling import SamplingParams
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.errors import ApiError
from llaisys.server.generation.prompts import MESSAGE_CHARS, PromptLimit
from llaisys.server.http.limits import CHARS_PER_TOKEN

# (before the beginning, before the end, before what is missing): texts that are one token each.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek's coders
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
REPOSITORY_MARKS = ("<|repo_name|>",)  # before the name of the project
FILE_MARKS = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")  # before each file's
# What ends an answer beside the model's own tokens: another file, or filling.
END_MARKS = (*REPOSITORY_MARKS, *FILE_MARKS, "<|fim_pad|>", "<fim_pad>", "▁<EOT>")
PROJECT = "project"  # its name, which nobody tells us


@dataclass(frozen=True, slots=True)
class Snippet:
    """Another text of the project; it may have no name."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Infill:
    """A prompt that ends where the missing text begins."""

    ids: list[int]
    ends: tuple[int, ...]  # tokens that end the answer

    def bounded(self, params: SamplingParams) -> SamplingParams:
        """The same, for an answer that ends at those tokens, too."""
        if params.ignore_eos:
            return params
        return params.clone(stop_token_ids=(*(params.stop_token_ids or ()), *self.ends))


class InfillMarks:
    """The tokens of one model. Raises ApiError when it has none; `field`: the one that asked."""

    def __init__(self, tokenizer: Any, vocab_size: int, field: str) -> None:
        def known(*texts: str) -> list[int]:
            found = [tokenizer.token_id(text) for text in texts]
            return [token for token in found if token is not None and token < vocab_size]

        complete = [marks for texts in MARKS if len(marks := known(*texts)) == len(texts)]
        if not complete:
            raise ApiError(
                400,
                f"{field} needs a model that can fill in the middle; this one has no tokens for "
                f"it, such as {MARKS[0][0]}",
                param=field,
                code="no_infill",
            )
        self.prefix, self.suffix, self.middle = complete[0]
        self.repository, self.file = known(*REPOSITORY_MARKS)[:1], known(*FILE_MARKS)[:1]
        self.ends = tuple(known(*END_MARKS))


async def encode_infill(
    engine: AsyncLLMEngine,
    prefix: str,
    suffix: str,
    limit: PromptLimit,
    field: str,
    snippets: Sequence[Snippet] = (),
    num_new: int = 0,
) -> Infill:
    """The beginning and the end fit, or are refused. Of the snippets the last are taken that leave
    room for them and for `num_new` tokens: the nearest to what is asked for come last."""
    tokenizer = engine.tokenizer_or_refuse()
    marks = InfillMarks(tokenizer, engine.inputs.info.vocab_size, field)
    limit.check_chars(len(prefix) + len(suffix))

    def encode(text: str) -> list[int]:
        limit.check_text(tokenizer, text)
        ids: list[int] = tokenizer.encode(text, False)
        return ids

    def make() -> Infill:
        start = list(tokenizer.encode("", True))
        asked = [marks.prefix, *encode(prefix), marks.suffix, *encode(suffix), marks.middle]
        is_project = marks.repository and marks.file
        head = [*marks.repository, *encode(f"{PROJECT}\n")] if is_project else []
        here = [*marks.file, *encode("\n")] if marks.file else []
        limit.check_tokens(len(start) + len(asked))
        room = limit.max_tokens - num_new - len(start) - len(asked) - len(head) - len(here)
        others = _last_that_fit(snippets, encode, marks.file, room)
        before = [*head, *others, *here] if others else []
        return Infill([*start, *before, *asked], marks.ends)

    size = len(prefix) + len(suffix) + sum(len(s.text) + MESSAGE_CHARS for s in snippets)
    return await engine.texts.run(size, make)


def _last_that_fit(
    snippets: Sequence[Snippet], encode: Any, file_mark: list[int], room: int
) -> list[int]:
    found: list[int] = []
    for snippet in reversed(snippets):
        text = f"{snippet.name}\n{snippet.text}\n"
        if len(text) > CHARS_PER_TOKEN * room:
            break
        try:
            ids = [*file_mark, *encode(text)]
        except ApiError:  # many more tokens than it seemed to have
            break
        if len(ids) > room:
            break
        found = ids + found
        room -= len(ids)
    return found
