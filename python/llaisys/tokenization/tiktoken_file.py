"""tiktoken files: lines of a token in base64 and its rank, as Llama 3 (`tokenizer.model`), Qwen 1
(`qwen.tiktoken`) and Kimi (`tiktoken.model`) ship.

tiktoken repeatedly joins the two adjacent parts whose join has the lowest rank. As merges: every
split of a token into two tokens is a merge, ordered by the rank of the token. A word that is a
token is not divided.
"""

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llaisys.common.errors import ModelLoadError
from llaisys.tokenization.json_file import read_bytes
from llaisys.tokenization.token_text import bytes_to_token

MAX_FILE_BYTES = 64 << 20
MAX_TOKEN_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class TiktokenFile:
    """`vocab` and `merges` in the byte-level alphabet. `special`: id -> token."""

    vocab: dict[str, int]
    merges: list[tuple[str, str]]
    pre_tokenizer: str  # a name of PRE_TOKENIZERS
    special: dict[int, str]


def is_tiktoken(path: Path) -> bool:
    """Whether the file begins like a tiktoken file; a SentencePiece model is binary."""
    try:
        with path.open("rb") as stream:
            token, _, rank = stream.read(256).split(b"\n")[0].partition(b" ")
        return rank.isdigit() and bool(base64.b64decode(token, validate=True))
    except (OSError, binascii.Error, ValueError):
        return False


def find_tiktoken(directory: Path) -> Path | None:
    """The tiktoken file of a model directory."""
    files = [*sorted(directory.glob("*.tiktoken")), directory / "tiktoken.model"]
    files.append(directory / "tokenizer.model")
    return next((path for path in files if path.is_file() and is_tiktoken(path)), None)


def read_tiktoken(path: Path, settings: dict[str, Any]) -> TiktokenFile:
    """`settings`: tokenizer_config.json, whose tokenizer_class selects the pattern and the special
    tokens."""
    ranks = _ranks(path)
    kind = settings.get("tokenizer_class")
    pre_tokenizer, special = _KINDS.get(kind if isinstance(kind, str) else "", _KINDS[""])
    vocab = {bytes_to_token(token): rank for token, rank in ranks.items()}
    own = special(len(ranks)) if not settings.get("added_tokens_decoder") else {}
    return TiktokenFile(vocab, _merges(ranks), pre_tokenizer, own)


def _ranks(path: Path) -> dict[bytes, int]:
    """Token -> rank; the ranks are 0, 1, ..."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, MAX_FILE_BYTES).splitlines()):
        if not line:
            continue
        parts = line.split()
        try:
            token, rank = base64.b64decode(parts[0], validate=True), int(parts[1])
        except (binascii.Error, ValueError, IndexError) as error:
            raise ModelLoadError(f"{path}: line {number + 1} is no token and rank") from error
        if rank != len(ranks) or token in ranks or not 0 < len(token) <= MAX_TOKEN_BYTES:
            raise ModelLoadError(
                f"{path}: line {number + 1}: rank {rank} of a token of {len(token)} bytes; "
                f"expected rank {len(ranks)} and a new token of 1 to {MAX_TOKEN_BYTES} bytes"
            )
        ranks[token] = rank
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ModelLoadError(f"{path}: there is no token for byte {missing[0]}")
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    found = []
    for token in ranks:  # ascending
        pairs = [(token[:cut], token[cut:]) for cut in range(len(token) - 1, 0, -1)]
        found += [
            (bytes_to_token(left), bytes_to_token(right))
            for left, right in pairs
            if left in ranks and right in ranks
        ]
    return found


def _llama3(first: int) -> dict[int, str]:
    reserved = "<|reserved_special_token_%d|>"
    names = ["<|begin_of_text|>", "<|end_of_text|>", *(reserved % i for i in range(4))]
    names += ["<|start_header_id|>", "<|end_header_id|>", reserved % 4, "<|eot_id|>"]
    names += [reserved % i for i in range(5, 251)]
    return dict(enumerate(names, first))


def _qwen(first: int) -> dict[int, str]:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return dict(enumerate([*names, *(f"<|extra_{i}|>" for i in range(205))], first))


# tokenizer_class -> (pre-tokenizer, special tokens without added_tokens_decoder)
_KINDS: dict[str, tuple[str, Callable[[int], dict[int, str]]]] = {
    "": ("llama-bpe", _llama3),
    "QWenTokenizer": ("qwen2", _qwen),
    "TikTokenTokenizer": ("kimi-k2", lambda first: {}),
}
