"""Special tokens around a pair of texts, the input of a cross-encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True, slots=True)
class PairAffixes:
    """Ids that the post-processor adds before, between and after two texts."""

    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    suffix: tuple[int, ...]
    has_types: bool  # the second text and the suffix have type 1 (BERT)

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> PairAffixes:
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
