"""`TokenizerSource`: plain data from which `Tokenizer` is built, created by model loaders."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, overload


@dataclass(frozen=True, slots=True)
class PackedStrings(Sequence[str]):
    """Many short strings in little memory, by index, decoded on each access: a vocabulary of 49,152
    tokens with its merges takes 10 MB as Python strings and 1.2 MB here."""

    data: bytes = b""  # UTF-8, concatenated
    ends: bytes = b""  # end offset of each string in `data`: u32, native order

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        data, ends = bytearray(), array("I")
        for text in texts:
            data += text.encode()
            ends.append(len(data))
        return cls(bytes(data), ends.tobytes())

    def __len__(self) -> int:
        return len(self.ends) // 4

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        number = range(len(self))[index]  # raises what a list raises
        if isinstance(number, range):
            return [self[i] for i in number]
        ends = memoryview(self.ends).cast("I")
        return self.data[ends[number - 1] if number else 0 : ends[number]].decode()

    def __iter__(self) -> Iterator[str]:
        first = 0
        for end in memoryview(self.ends).cast("I"):
            yield self.data[first:end].decode()
            first = end


@dataclass(frozen=True, slots=True)
class BpeVocabulary:
    """The vocabulary of GGUF metadata: byte-level BPE with merges and a pre-tokenizer,
    SentencePiece BPE with scores, or WordPiece."""

    tokens: PackedStrings  # by id, in the byte-level alphabet or with U+2581 for spaces
    token_types: tuple[int, ...]  # by id: 1 normal, 3 control, 4 user defined, 6 byte; or empty
    merges: PackedStrings = PackedStrings()  # "left right", best first
    pre_tokenizer: str = ""  # llama.cpp's name: 'smollm', 'qwen2', 'llama-bpe', 'gpt-2', ...
    add_bos: bool = False
    add_eos: bool = False
    scores: tuple[float, ...] = ()  # by id; not empty: SentencePiece, highest joins first
    add_space_prefix: bool = True  # SentencePiece: put a space before the text
    is_word_piece: bool = False  # tokens that begin a word begin with U+2581


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """At most one of `directory` and `vocabulary` is set; neither means no tokenizer.

    With `directory`, its files provide everything but `eos_token_ids`; with `vocabulary`, the ids
    and the chat template are here.
    """

    directory: str | None = None
    vocabulary: BpeVocabulary | None = None
    chat_template: str | None = None
    special_ids: tuple[tuple[str, int], ...] = ()  # ('bos_token', id), ...
    eos_token_ids: tuple[int, ...] = ()
    missing: str = "the model has no tokenizer"  # why neither is set

    @classmethod
    def of_directory(cls, directory: Path, eos_token_ids: tuple[int, ...]) -> Self:
        """Missing without tokenizer files: token ids still work."""
        files = ("tokenizer.json", "vocab.json", "tokenizer.model", "tiktoken.model", "vocab.txt")
        names = (*files, "sentencepiece.bpe.model")
        has_tokenizer = any((directory / name).is_file() for name in names)
        if not has_tokenizer and not any(directory.glob("*.tiktoken")):
            return cls(missing=f"{directory} has no tokenizer files")
        return cls(directory=str(directory), eos_token_ids=eos_token_ids)
