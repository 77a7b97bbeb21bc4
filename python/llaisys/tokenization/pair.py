"""The input of a reranker: two texts with special tokens, or a chat that asks about them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import tokenizers

from llaisys.common.validation import invalid_value

# The prompt of the model card of Qwen3-Reranker.
JUDGE_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
JUDGE_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCT = "<Instruct>: "
_TASK = "Given a web search query, retrieve relevant passages that answer the query"


def judge_text(field: str, query: object, document: object) -> str:
    """The text between JUDGE_PREFIX and JUDGE_SUFFIX. A query that begins with '<Instruct>: ' has
    its own instruction, and its '<Query>: '. InvalidInputError naming `field`: token ids."""
    if not isinstance(query, str) or not isinstance(document, str):
        given = document if isinstance(query, str) else query
        raise invalid_value(field, given, "strings: this reranker joins the texts")
    if not query.startswith(_INSTRUCT):
        query = f"{_INSTRUCT}{_TASK}\n<Query>: {query}"
    return f"{query}\n<Document>: {document}"


@dataclass(frozen=True, slots=True)
class PairAffixes:
    """Ids that the post-processor adds before, between and after two texts."""

    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    suffix: tuple[int, ...]
    has_types: bool  # the second text and the suffix have type 1 (BERT)

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> Self:
        """Found with a pair of short texts."""
        found = tokenizer.encode("a", "a", add_special_tokens=True)
        texts, ids = found.sequence_ids, found.ids
        if 0 not in texts or 1 not in texts:
            return cls((), (), (), False)
        begin, middle = texts.index(0), texts.index(1)
        end, last = begin + texts.count(0), middle + texts.count(1)
        has_types = found.type_ids[middle] == 1
        return cls(tuple(ids[:begin]), tuple(ids[end:middle]), tuple(ids[last:]), has_types)

    def join(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], int | None]:
        """See `Tokenizer.join_pair`."""
        head = [*self.prefix, *first, *self.middle]
        return [*head, *second, *self.suffix], len(head) if self.has_types else None
