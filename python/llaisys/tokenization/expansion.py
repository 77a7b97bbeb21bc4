"""Static bound of the text expansion by the rules of a tokenizer.

Consecutive Replace rules multiply: two kilobytes of rules can turn one letter into gigabytes. The
expansion of every rule is bounded from its definition; a tokenizer whose product exceeds
`MAX_EXPANSION` is rejected.
"""

import base64
import json
from typing import Any

import tokenizers

from llaisys.common.errors import ModelLoadError

MAX_EXPANSION = 64  # output characters per input character; usual normalizers stay below 20
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
# Unicode's own bounds; a byte-level rule turns one character into up to four.
_FACTORS = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 12}
_FACTORS |= {"ByteLevel": 4, "Metaspace": 2}


def check_expansion(tokenizer: tokenizers.Tokenizer) -> None:
    """Raise `ModelLoadError` naming the component that exceeds the limit."""
    for part in _PARTS:
        rule = getattr(tokenizer, part)
        if rule is None:
            continue
        factor = _factor(json.loads(rule.__getstate__()))
        if factor > MAX_EXPANSION:
            raise ModelLoadError(
                f"tokenizer: the {part} may make a text {factor:.3g} times as long; the limit is "
                f"{MAX_EXPANSION}"
            )


def _factor(rule: dict[str, Any]) -> float:
    """Upper bound of output characters per input character."""
    kind = rule.get("type")
    if kind == "Sequence":
        result = 1.0
        for item in next(value for value in rule.values() if isinstance(value, list)):
            result = min(result * _factor(item), 1e30)
        return result
    if kind == "Replace":
        return _replace(rule["pattern"], rule["content"])
    if kind == "Prepend":
        return 1.0 + len(rule["prepend"])
    if kind == "Precompiled":
        return _longest_replacement(rule["precompiled_charsmap"])
    return float(_FACTORS.get(str(kind), 1))


def _replace(pattern: dict[str, str], content: str) -> float:
    text = pattern.get("String")
    if not text:  # a regular expression may match nothing, before every character
        return 1.0 + len(content)
    return max(1.0, len(content) / len(text))


def _longest_replacement(charsmap: str) -> float:
    """A SentencePiece character map: size of a trie, the trie, NUL-terminated replacements."""
    data = base64.b64decode(charsmap)
    strings = data[4 + int.from_bytes(data[:4], "little") :]
    texts = strings.decode("utf-8", "replace").split("\0")
    return float(max(1, *map(len, texts)))
