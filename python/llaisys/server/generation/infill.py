"""Fill-in-the-middle (FIM) prompts with the model's special tokens, optionally after other files of
the project."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llaisys.common.sampling import SamplingParams
from llaisys.server.engine_client.async_engine import AsyncLLMEngine
from llaisys.server.errors import ApiError
from llaisys.server.generation.prompts import CHARS_PER_TOKEN, MESSAGE_CHARS, PromptLimit

# (prefix, suffix, middle) markers, each one special token.
FIM_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek's coders
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
REPOSITORY_MARKERS = ("<|repo_name|>",)  # before the repository name
FILE_MARKERS = ("<|file_sep|>", "<|file_separator|>", "<file_sep>")  # before each file name
# Additional stop tokens: the start of another file, or padding.
END_MARKERS = (*REPOSITORY_MARKERS, *FILE_MARKERS, "<|fim_pad|>", "<fim_pad>", "▁<EOT>")
PROJECT = "project"  # repository name; requests have none


@dataclass(frozen=True, slots=True)
class Snippet:
    """Another file of the project; the name may be empty."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Infill:
    """A FIM prompt."""

    ids: list[int]
    ends: tuple[int, ...]  # stop tokens

    def with_stop_tokens(self, params: SamplingParams) -> SamplingParams:
        if params.ignore_eos:
            return params
        return params.clone(stop_token_ids=(*(params.stop_token_ids or ()), *self.ends))


class FimTokens:
    """The FIM tokens of a model. Raises ApiError, for request field `field`, if it has none."""

    def __init__(self, tokenizer: Any, vocab_size: int, field: str) -> None:
        def known(*texts: str) -> list[int]:
            found = [tokenizer.token_id(text) for text in texts]
            return [token for token in found if token is not None and token < vocab_size]

        complete = [ids for texts in FIM_MARKERS if len(ids := known(*texts)) == len(texts)]
        if not complete:
            raise ApiError(
                400,
                f"{field} needs a model that can fill in the middle; this one has no tokens for "
                f"it, such as {FIM_MARKERS[0][0]}",
                param=field,
                code="no_infill",
            )
        self.prefix, self.suffix, self.middle = complete[0]
        self.repository, self.file = known(*REPOSITORY_MARKERS)[:1], known(*FILE_MARKERS)[:1]
        self.ends = tuple(known(*END_MARKERS))


async def encode_infill(
    engine: AsyncLLMEngine,
    prefix: str,
    suffix: str,
    limit: PromptLimit,
    field: str,
    snippets: Sequence[Snippet] = (),
    num_new: int = 0,
) -> Infill:
    """Build the prompt. Raises ApiError if prefix and suffix do not fit. Of the snippets as many of
    the last ones are used as leave room for `num_new` tokens; the most relevant come last."""
    tokenizer = engine.require_tokenizer()
    fim = FimTokens(tokenizer, engine.inputs.info.vocab_size, field)
    limit.check_chars(len(prefix) + len(suffix))

    def encode(text: str) -> list[int]:
        limit.check_text(tokenizer, text)
        return tokenizer.encode(text, False)

    def make() -> Infill:
        start = list(tokenizer.encode("", True))
        core = [fim.prefix, *encode(prefix), fim.suffix, *encode(suffix), fim.middle]
        is_project = fim.repository and fim.file
        head = [*fim.repository, *encode(f"{PROJECT}\n")] if is_project else []
        here = [*fim.file, *encode("\n")] if fim.file else []
        limit.check_tokens(len(start) + len(core))
        room = limit.max_tokens - num_new - len(start) - len(core) - len(head) - len(here)
        others = _last_that_fit(snippets, encode, fim.file, room)
        before = [*head, *others, *here] if others else []
        return Infill([*start, *before, *core], fim.ends)

    size = len(prefix) + len(suffix) + sum(len(s.text) + MESSAGE_CHARS for s in snippets)
    return await engine.texts.run(size, make)


def _last_that_fit(
    snippets: Sequence[Snippet], encode: Any, file_token: list[int], room: int
) -> list[int]:
    found: list[int] = []
    for snippet in reversed(snippets):
        text = f"{snippet.name}\n{snippet.text}\n"
        if len(text) > CHARS_PER_TOKEN * room:
            break
        try:
            ids = [*file_token, *encode(text)]
        except ApiError:  # more tokens than its length suggested
            break
        if len(ids) > room:
            break
        found = ids + found
        room -= len(ids)
    return found
