"""llama.cpp's slots: with `--slot-save-path`, requests with `id_slot` have a prefix cache per slot,
whose tokens can be saved to a file and computed again from it.

A file has the header of llama.cpp's sequence state (magic, version, number of words), then a word
-1, a version and the number of tokens, then the token ids. Files without these three words are
accepted. KV blocks are not stored: `restore` computes the tokens.
"""

import os
import re
import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from llaisys.common.errors import InvalidInputError
from llaisys.common.validation import check_int
from llaisys.server.http.key_budgets import ANONYMOUS

FILENAME = re.compile(r"(?!\.)[A-Za-z0-9_. -]{1,200}(?<![. ])")
HEADER = struct.Struct("=III")
MAGIC, VERSION = 0x67677371, 2  # "ggsq"
PACKED = struct.Struct("=iII")
PACKED_VERSION = 1


@dataclass(slots=True)
class Slot:
    """The tokens of the last request of a slot. `generation` counts erasures and restores."""

    tokens: tuple[int, ...] = ()
    generation: int = 0


class SlotTable:
    """Slots of one model by owner and number; `folder` None: slots have no effect."""

    def __init__(self, folder: Path | None, count: int) -> None:
        self.folder = folder
        self.count = count
        self._slots: defaultdict[tuple[str, int], Slot] = defaultdict(Slot)

    def check(self, number: int) -> int:
        return check_int("id_slot", number, 0, self.count - 1)

    def salt(self, owner: str, number: int | None) -> str | None:
        """Return the cache salt of a slot's requests; None: the shared cache."""
        if self.folder is None or number is None or number < 0:
            return None
        return f"slot:{number}:{self._slots[owner, self.check(number)].generation}"

    def record(self, owner: str, number: int | None, tokens: list[int]) -> None:
        if self.folder is not None and number is not None and number >= 0:
            self._slots[owner, number].tokens = tuple(tokens)

    def tokens(self, owner: str, number: int) -> tuple[int, ...]:
        return self._slots[owner, number].tokens

    def replace(self, owner: str, number: int, tokens: tuple[int, ...] = ()) -> int:
        """Start an empty cache for a slot; return the number of its earlier tokens."""
        slot = self._slots[owner, number]
        count, slot.tokens = len(slot.tokens), tokens
        slot.generation += 1
        return count

    def path(self, owner: str, filename: str) -> Path:
        """Return the file of a name; each API key has its own folder. Raises InvalidInputError."""
        if not FILENAME.fullmatch(filename):
            limit = "a file name of letters, digits, '_', '-', '.' and spaces"
            raise InvalidInputError(
                f"filename must be {limit}", field="filename", value=filename[:200], limit=limit
            )
        assert self.folder is not None
        return (self.folder if owner == ANONYMOUS else self.folder / owner) / filename


def write_tokens(path: Path, tokens: tuple[int, ...]) -> int:
    """Write a slot file in one piece; return its size."""
    packed = PACKED.pack(-1, PACKED_VERSION, len(tokens))
    data = HEADER.pack(MAGIC, VERSION, 3 + len(tokens)) + packed
    data += struct.pack(f"={len(tokens)}I", *tokens)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(data)
    draft.replace(path)
    return len(data)


def read_tokens(path: Path, max_tokens: int, vocab_size: int) -> tuple[tuple[int, ...], int]:
    """Return the tokens of a slot file and the bytes read. Raises InvalidInputError."""
    try:
        with path.open("rb") as file:
            head = file.read(HEADER.size)
            magic, _, count = HEADER.unpack(head) if len(head) == HEADER.size else (0, 0, 0)
            if magic != MAGIC or count > max_tokens + 3:
                raise _invalid("is no slot file for this model's context length")
            words = file.read(4 * count)
    except OSError as error:
        raise _invalid(f"cannot be read: {error.strerror}") from None
    tokens = struct.unpack(f"={len(words) // 4}i", words[: len(words) // 4 * 4])
    if tokens[:1] == (-1,):
        tokens = tokens[3:]
    if len(words) < 4 * count or any(not 0 <= token < vocab_size for token in tokens):
        raise _invalid("is cut off, or of a model with another vocabulary")
    return tokens, len(head) + len(words)


def _invalid(reason: str) -> InvalidInputError:
    return InvalidInputError(f"filename {reason}", field="filename", code="invalid_slot_file")
