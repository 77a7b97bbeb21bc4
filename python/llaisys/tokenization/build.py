"""Builds `tokenizers` objects from the files of a model directory or GGUF metadata."""

import contextlib
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from llaisys.common.errors import ModelLoadError
from llaisys.common.validation import is_int
from llaisys.tokenization import encoder_files
from llaisys.tokenization.encoder_files import gguf_word_piece, unigram, word_piece
from llaisys.tokenization.json_file import read_bytes, read_json_object
from llaisys.tokenization.sentencepiece_file import (
    default_kinds,
    read_sentencepiece,
    sentencepiece_bpe,
)
from llaisys.tokenization.source import BpeVocabulary
from llaisys.tokenization.tiktoken_file import find_tiktoken, read_tiktoken

T = TypeVar("T")

MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
MAX_TOKEN_ID = 10**9
# Added tokens: the automaton and the patterns that find them cost up to 2 seconds per million
# characters.
MAX_ADDED_TOKENS = 1 << 17
MAX_ADDED_CHARS = 4 << 20
CONTROL, USER_DEFINED = 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
LLAMA3_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SLASH_TAIL = _TAIL.replace(r"[\r\n]*", r"[\r\n/]*", 1)
TEKKEN_PATTERN = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}" + _SLASH_TAIL
)  # Mistral Nemo
GPT4O_PATTERN = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}" + _SLASH_TAIL
)  # o200k

_HAN = r"\p{Han}"
_OTHER_UPPER, _OTHER_LOWER = (f"[{part}&&[^{_HAN}]]" for part in (_UPPER, _LOWER))
KIMI_PATTERN = (
    rf"[{_HAN}]+|{_LEAD}{_OTHER_UPPER}*{_OTHER_LOWER}+{_CONTRACTIONS}?"
    rf"|{_LEAD}{_OTHER_UPPER}+{_OTHER_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}" + _TAIL
)
SEED_PATTERN = _CONTRACTIONS + (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EXAONE_MOE_PATTERN = _CONTRACTIONS + (
    r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Patterns that are applied one after another.
DEEPSEEK_PATTERNS = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
DEEPSEEK_V3_PATTERNS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

# llama.cpp's pre-tokenizer names -> kind of splitting.
PRE_TOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "roberta-bpe"), "gpt2"),
    "exaone4": "gpt2",
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), "digits"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
    "seed-coder": "seed",
    "exaone-moe": "exaone-moe",
    "deepseek-llm": "deepseek",
    **dict.fromkeys(("deepseek-v3", "joyai-llm"), "deepseek-v3"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), "llama3"),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), "gpt4"),
    **dict.fromkeys(("stablelm2", "solar-open"), "stablelm2"),  # qwen2 without normalisation
    "tekken": "tekken",
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), "gpt4o"),
    "kimi-k2": "kimi",
}
_PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen2", "stablelm2"), (QWEN2_PATTERN,)),
    **dict.fromkeys(("llama3", "gpt4"), (LLAMA3_PATTERN,)),
    "tekken": (TEKKEN_PATTERN,),
    "gpt4o": (GPT4O_PATTERN,),
    "kimi": (KIMI_PATTERN,),
    "seed": (SEED_PATTERN,),
    "exaone-moe": (EXAONE_MOE_PATTERN,),
    "deepseek": DEEPSEEK_PATTERNS,
    "deepseek-v3": DEEPSEEK_V3_PATTERNS,
}
_WHOLE_WORDS = ("llama3", "tekken", "kimi")  # a word that is a token is not divided by merges
_TOKENIZER_CLASSES = {
    "Qwen2Tokenizer": "qwen2",
    "Qwen2TokenizerFast": "qwen2",
    "GPT2Tokenizer": "gpt-2",
    "GPT2TokenizerFast": "gpt-2",
}


def as_load_error(where: str, build: Callable[[], T]) -> T:
    """Run `build`; convert any error of the Rust library, panics included, to `ModelLoadError`."""
    try:
        return build()
    except (KeyboardInterrupt, SystemExit, GeneratorExit, ModelLoadError):
        raise
    except BaseException as error:
        raise ModelLoadError(f"{where}: {type(error).__name__}: {str(error)[:300]}") from error


class _AddedContent(msgspec.Struct):
    content: str


class _AddedPart(msgspec.Struct):
    """The part of tokenizer.json that is counted before the library reads it."""

    added_tokens: list[_AddedContent] = []


def check_added(contents: Collection[str], where: str) -> None:
    """Raise ModelLoadError if the added tokens exceed a limit."""
    chars = sum(map(len, contents))
    if len(contents) > MAX_ADDED_TOKENS or chars > MAX_ADDED_CHARS:
        raise ModelLoadError(
            f"{where}: {len(contents)} added tokens of {chars} characters together; at most "
            f"{MAX_ADDED_TOKENS} tokens and {MAX_ADDED_CHARS} characters are supported"
        )


def pre_tokenizer_of(kind: str) -> pre_tokenizers.PreTokenizer:
    patterns = _PATTERNS.get(kind, ())
    parts: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(p), behavior="isolated", invert=False) for p in patterns
    ]
    if kind == "digits":
        parts = [pre_tokenizers.Digits(individual_digits=True)]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    return pre_tokenizers.Sequence([*parts, byte_level]) if parts else byte_level


def byte_level_bpe(
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    pre_name: str,
    keeps_words: bool = False,
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer without added tokens; `pre_name` is a key of PRE_TOKENIZERS.
    `keeps_words`: a word that is a token is not divided, whatever the pre-tokenizer."""
    kind = PRE_TOKENIZERS.get(pre_name)
    if kind is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelLoadError(f"tokenizer: unknown pre-tokenizer {pre_name!r}; known: {known}")
    keeps_words = keeps_words or kind in _WHOLE_WORDS
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=keeps_words)
    result = tokenizers.Tokenizer(model)
    if kind == "qwen2":
        result.normalizer = normalizers.NFC()
    result.pre_tokenizer = pre_tokenizer_of(kind)
    result.decoder = decoders.ByteLevel()
    return result


def _split_merges(merges: Iterable[str], where: str) -> list[tuple[str, str]]:
    pairs = []
    for number, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not left or not space or not right or " " in right:
            raise ModelLoadError(f"{where}: merge {number} is {merge[:80]!r}, not two tokens")
        pairs.append((left, right))
    return pairs


def from_vocabulary(vocabulary: BpeVocabulary, special_ids: dict[str, int]) -> tokenizers.Tokenizer:
    """A tokenizer from GGUF metadata; ids are positions in `vocabulary.tokens`."""
    tokens, types = vocabulary.tokens, vocabulary.token_types
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        duplicate = next(t for i, t in enumerate(tokens) if vocab[t] != i)
        raise ModelLoadError(f"tokenizer: the vocabulary contains {duplicate!r} twice")
    for name, token_id in special_ids.items():
        if not 0 <= token_id < len(tokens):
            raise ModelLoadError(f"tokenizer: {name} id {token_id}, outside [0, {len(tokens)})")
    if vocabulary.is_word_piece:
        return as_load_error("tokenizer", lambda: gguf_word_piece(tokens, types))
    if vocabulary.scores:
        kinds = types or default_kinds(tokens, special_ids)
        build = lambda: sentencepiece_bpe(vocabulary, vocab, kinds)  # noqa: E731
    else:
        ends = {i for name, i in special_ids.items() if name in ("bos_token", "eos_token")}
        kinds = types or tuple(CONTROL if i in ends else 1 for i in range(len(tokens)))
        merges = _split_merges(vocabulary.merges, "tokenizer.ggml.merges")
        build = lambda: byte_level_bpe(vocab, merges, vocabulary.pre_tokenizer)  # noqa: E731
    result = as_load_error("tokenizer", build)
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED) and token
    ]
    check_added([token.content for token in added], "tokenizer")
    as_load_error("tokenizer", lambda: result.add_tokens(added))
    result.post_processor = _post_processor(vocabulary, special_ids)
    return result


def _post_processor(
    vocabulary: BpeVocabulary, special_ids: dict[str, int]
) -> processors.PostProcessor:
    template, specials = ["$A"], []
    affixes = ((vocabulary.add_bos, "bos_token", 0), (vocabulary.add_eos, "eos_token", 1))
    for add, name, end in affixes:
        if add and name in special_ids:
            token_id = special_ids[name]
            template.insert(len(template) * end, name)
            specials.append({"id": name, "ids": [token_id], "tokens": [name]})
    return as_load_error(
        "tokenizer", lambda: processors.TemplateProcessing(" ".join(template), None, specials)
    )


def from_directory(directory: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    """From tokenizer.json, a tiktoken file, vocab.json + merges.txt with tokenizer_config.json,
    tokenizer.model (SentencePiece), sentencepiece.bpe.model (XLM-RoBERTa) or vocab.txt (BERT)."""
    path = directory / "tokenizer.json"
    if path.is_file():
        text = read_bytes(path, MAX_TOKENIZER_BYTES)
        with contextlib.suppress(msgspec.MsgspecError):  # invalid: the library says why
            part = msgspec.json.decode(text, type=_AddedPart)
            check_added([token.content for token in part.added_tokens], str(path))
            text = as_load_error(str(path), partial(encoder_files.hide_special_pieces, text))
        try:
            result = as_load_error(str(path), lambda: tokenizers.Tokenizer.from_str(text.decode()))
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{path}: not UTF-8: {error.reason}") from error
        result.no_truncation()
        result.no_padding()
        return result
    if (ranks := find_tiktoken(directory)) is not None:
        return _from_tiktoken(ranks, settings)
    if (directory / "vocab.json").is_file():
        return _from_vocab_files(directory, settings)
    if (directory / "tokenizer.model").is_file():
        return _from_sentencepiece(directory, settings)
    for name, build in ((encoder_files.UNIGRAM, unigram), (encoder_files.VOCAB_TXT, word_piece)):
        if (directory / name).is_file():
            result = as_load_error(str(directory / name), partial(build, directory, settings))
            return _with_added(result, directory, settings)
    raise ModelLoadError(
        f"{directory}: no tokenizer.json, tokenizer.model, tiktoken file, {encoder_files.UNIGRAM}, "
        f"{encoder_files.VOCAB_TXT} or vocab.json + merges.txt"
    )


def _with_added(
    result: tokenizers.Tokenizer, directory: Path, settings: dict[str, Any]
) -> tokenizers.Tokenizer:
    """With the added tokens of tokenizer_config.json."""
    entries = _added_entries(settings.get("added_tokens_decoder"))
    check_added([str(entry.get("content", "")) for _, entry in entries], str(directory))
    as_load_error(str(directory), lambda: _add_tokens(result, entries))
    return result


def _from_tiktoken(path: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    file = read_tiktoken(path, settings)
    build = lambda: byte_level_bpe(file.vocab, file.merges, file.pre_tokenizer, True)  # noqa: E731
    result = as_load_error(str(path), build)
    special = [AddedToken(name, special=True, normalized=False) for name in file.special.values()]
    as_load_error(str(path), lambda: result.add_tokens(special))
    result = _with_added(result, path.parent, settings)
    bos = settings.get("bos_token", "<|begin_of_text|>")
    bos_id = result.token_to_id(bos) if isinstance(bos, str) else None
    if bos_id is not None and settings.get("add_bos_token", bos == "<|begin_of_text|>"):
        result.post_processor = processors.TemplateProcessing(
            f"{bos} $A", None, [{"id": bos, "ids": [bos_id], "tokens": [bos]}]
        )
    return result


def _from_sentencepiece(directory: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    """tokenizer.model, with the added tokens of tokenizer_config.json."""
    add_bos, add_eos = settings.get("add_bos_token", True), settings.get("add_eos_token", False)
    found = read_sentencepiece(directory / "tokenizer.model", add_bos is True, add_eos is True)
    result = from_vocabulary(*found)
    return _with_added(result, directory, settings)


def _from_vocab_files(directory: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    vocab_path, merges_path = directory / "vocab.json", directory / "merges.txt"
    if not merges_path.is_file():
        raise ModelLoadError(f"{directory}: vocab.json without merges.txt and no tokenizer.json")
    kind = settings.get("tokenizer_class")
    if not isinstance(kind, str) or kind not in _TOKENIZER_CLASSES:
        known = ", ".join(_TOKENIZER_CLASSES)
        raise ModelLoadError(
            f"{directory}: tokenizer_class {kind!r} cannot be built from vocab.json; known: {known}"
        )
    vocab = read_json_object(vocab_path)
    for token, token_id in vocab.items():
        if not is_int(token_id, 0, MAX_TOKEN_ID):
            raise ModelLoadError(f"{vocab_path}: token {token!r} has id {token_id!r}")
    lines = read_bytes(merges_path).decode("utf-8", "replace").split("\n")
    merges = _split_merges(
        (line for line in lines if line and not line.startswith("#version")), str(merges_path)
    )
    build = lambda: byte_level_bpe(vocab, merges, _TOKENIZER_CLASSES[kind])  # noqa: E731
    result = as_load_error(str(vocab_path), build)
    return _with_added(result, directory, settings)


def _add_tokens(target: tokenizers.Tokenizer, entries: list[tuple[int, dict[str, Any]]]) -> None:
    """Add all tokens in one call: the library rebuilds its automaton per call."""
    ordered = sorted(entries, key=lambda pair: pair[0])
    target.add_tokens([AddedToken(**entry) for _, entry in ordered])
    for token_id, entry in ordered:
        if target.token_to_id(entry["content"]) != token_id:
            raise ModelLoadError(
                f"tokenizer: added token {entry['content']!r} cannot have id {token_id}"
            )


def _added_entries(added: object) -> list[tuple[int, dict[str, Any]]]:
    """(id, AddedToken arguments) from added_tokens_decoder of tokenizer_config.json."""
    keys = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    result = []
    for token_id, entry in added.items() if isinstance(added, dict) else ():
        if not token_id.isdecimal() or not isinstance(entry, dict):
            raise ModelLoadError(f"tokenizer_config.json: bad added token {token_id!r}")
        result.append((int(token_id), {key: entry[key] for key in keys if key in entry}))
    return result


def without_special_tokens(
    tokenizer: tokenizers.Tokenizer, control: frozenset[str]
) -> tokenizers.Tokenizer:
    """A tokenizer that encodes the names of the tokens in `control` as ordinary text.

    It shares the model (vocabulary and merges) with `tokenizer`.
    """
    result = tokenizers.Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        value = getattr(tokenizer, part)
        if value is not None:
            setattr(result, part, value)
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    tokens = [
        AddedToken(
            token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.content in control,
        )
        for _, token in added
    ]
    result.add_tokens(tokens)
    for token_id, token in added:
        if result.token_to_id(token.content) != token_id:
            raise ModelLoadError(f"tokenizer: added token {token.content!r} has the wrong id")
    result.encode_special_tokens = True
    return result
