"""vocab.txt, sentencepiece.bpe.model and tiktoken files: ids equal to transformers, sentencepiece
and tiktoken; damaged files rejected."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tokenizers
import transformers
from sentencepiece_models import texts

from llaisys.common.errors import ModelLoadError
from llaisys.tokenization import Tokenizer
from llaisys.tokenization.build import KIMI_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN
from llaisys.tokenization.token_text import token_to_bytes

ODD = [
    *("", " ", "\n", "a\tb", "Ünïcödé ÀÉÎ", "深度学习 and 漢字", "日本語テキスト", "한국어"),
    *("e\u0301 combining", "emoji 👩‍👩‍👧 🇩🇪", "don't we'll I'M", "x" * 150, "1234567 3.14"),
    *("\u200bzero\u00a0width", "ﬁ ligature ½", "a  b   c", "...!?--", "\u2581under"),
    *("Straße İstanbul", "[CLS] literal </s> <|im_end|>", "𓂀 unknown"),
]


def samples(count: int, seed: int) -> list[str]:
    return [*ODD, *texts(count, seed)]


# ---- WordPiece -----------------------------------------------------------------------------------


def write_vocab_txt(directory: Path, **settings: Any) -> Path:
    trained = tokenizers.BertWordPieceTokenizer(lowercase=settings.get("do_lower_case", True))
    trained.train_from_iterator(texts(2000, 3), vocab_size=600, show_progress=False)
    vocab = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    (directory / "vocab.txt").write_text("".join(f"{token}\n" for token, _ in vocab))
    kind = {"tokenizer_class": "BertTokenizer"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**kind, **settings}))
    return directory


@pytest.mark.parity
@pytest.mark.parametrize(
    "settings",
    [{}, {"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False}],
    ids=str,
)
def test_word_piece_ids_equal_transformers(settings: dict[str, Any], tmp_path: Path) -> None:
    directory = write_vocab_txt(tmp_path, **settings)
    own = Tokenizer.from_directory(directory)
    reference = transformers.AutoTokenizer.from_pretrained(directory)
    for text in samples(400, 8):
        # Names of special tokens in a text are ordinary characters here.
        wanted = reference(text, split_special_tokens=True)["input_ids"]
        assert own.encode(text) == wanted, repr(text)
    first, second = "the cat", "sat on"
    pair = reference(first, second)
    ids, second_text = own.join_pair(own.encode(first, False), own.encode(second, False))
    assert ids == pair["input_ids"]
    assert second_text == pair["token_type_ids"].index(1)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[UNK]\n[CLS]\n", "no sep_token"), ("a\na\n", "'a' is there twice"), ("\udcff", "not UTF-8")],
    ids=["missing", "twice", "utf-8"],
)
def test_damaged_vocab_txt_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.from_directory(tmp_path)


# ---- unigram -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unigram() -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([t.replace("\0", "") for t in texts(3000, 4)]),
        model_writer=model,
        model_type="unigram",
        vocab_size=2600,
        hard_vocab_limit=False,
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parity
def test_unigram_ids_equal_sentencepiece_and_transformers(
    unigram: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    (tmp_path / "sentencepiece.bpe.model").write_bytes(unigram.serialized_model_proto())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "XLMRobertaTokenizer"}')
    own = Tokenizer.from_directory(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    saved = tmp_path / "saved"
    reference.save_pretrained(saved)
    from_json = Tokenizer.from_directory(saved)
    assert own.vocab_size == unigram.vocab_size() + 2
    same = 0
    every = [text for text in samples(400, 9) if "\0" not in text]
    for text in every:
        ids = own.encode(text)
        assert from_json.encode(text) == ids
        if "</s>" not in text:  # transformers finds special tokens in a text
            assert ids == reference(text, split_special_tokens=True)["input_ids"], repr(text)
        pieces = [i + 1 if i else 3 for i in unigram.encode(text)]  # 0 is <unk>
        same += ids[1:-1] == pieces
    assert same > 0.9 * len(every)  # the libraries differ for sequences of unknown characters
    assert not {0, 1, 2} & set(own.encode("a <s> b </s><pad>", False))
    ids, second_text = own.join_pair([5, 6], [7])
    assert (ids, second_text) == ([0, 5, 6, 2, 2, 7, 2], None)


# ---- tiktoken ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """A byte-level vocabulary whose ids are ranks, as tiktoken has them."""
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(samples(4000, 5), vocab_size=1200, show_progress=False)
    vocab = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    return {token_to_bytes(token): i for i, (token, _) in enumerate(vocab)}


def write_tiktoken(path: Path, ranks: dict[bytes, int], **settings: Any) -> Path:
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    path.write_bytes(b"".join(lines))
    (path.parent / "tokenizer_config.json").write_text(json.dumps(settings))
    return path.parent


@pytest.mark.parametrize(
    ("name", "kind", "pattern", "end"),
    [
        ("tokenizer.model", "PreTrainedTokenizerFast", LLAMA3_PATTERN, "<|eot_id|>"),
        ("qwen.tiktoken", "QWenTokenizer", QWEN2_PATTERN, "<|im_end|>"),
        ("tiktoken.model", "TikTokenTokenizer", KIMI_PATTERN, ""),
    ],
)
def test_tiktoken_ids(
    name: str, kind: str, pattern: str, end: str, ranks: dict[bytes, int], tmp_path: Path
) -> None:
    own = Tokenizer.from_directory(write_tiktoken(tmp_path / name, ranks, tokenizer_class=kind))
    reference = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in samples(600, 6):
        if kind == "QWenTokenizer":
            import unicodedata

            text = unicodedata.normalize("NFC", text)
        wanted = reference.encode(text, disallowed_special=())
        assert own.encode(text, False) == wanted, repr(text)
        assert own.decode_tokens(wanted) == reference.decode(wanted), repr(text)
    if end:
        offset = 9 if kind != "QWenTokenizer" else 2
        assert own.token_id(end) == len(ranks) + offset and own.token_id(end) in own.special_ids
    bos = [len(ranks)] if name == "tokenizer.model" else []
    assert own.encode("a") == [*bos, *own.encode("a", False)]


def test_added_tokens_of_a_tiktoken_directory(ranks: dict[bytes, int], tmp_path: Path) -> None:
    added = {str(len(ranks)): {"content": "[BOS]", "special": True, "normalized": False}}
    settings = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": added}
    own = Tokenizer.from_directory(write_tiktoken(tmp_path / "tiktoken.model", ranks, **settings))
    assert own.special_ids == {len(ranks)} and own.vocab_size == len(ranks) + 1


def test_damaged_tiktoken_files_are_refused(ranks: dict[bytes, int], tmp_path: Path) -> None:
    path = tmp_path / "x.tiktoken"
    rng = random.Random(7)
    write_tiktoken(path, ranks)
    lines = path.read_bytes().splitlines(keepends=True)
    cases = {
        "rank": [*lines[:5], *lines[6:]],
        "no token and rank": [*lines[:9], b"AAA\n", *lines[9:]],
        "no token for byte": lines[:200],
        "expected rank": [lines[0], *lines],
    }
    for message, changed in cases.items():
        path.write_bytes(b"".join(changed))
        with pytest.raises(ModelLoadError, match=message):
            Tokenizer.from_directory(tmp_path)
    for _ in range(30):
        data = bytearray(b"".join(lines))
        data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            Tokenizer.from_directory(tmp_path)
        except ModelLoadError as error:
            assert str(path) in str(error) or "no tokenizer" in str(error)
