"""`tokenizer.model` directories: ids equal to the sentencepiece library, damaged files rejected."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import sentencepiece
from sentencepiece_models import BOS, EOS, VOCAB, texts, train

from llaisys.common.errors import ModelLoadError
from llaisys.tokenization import Tokenizer


@pytest.fixture(scope="module")
def reference() -> sentencepiece.SentencePieceProcessor:
    return train(user_defined_symbols=["<tool>"])


def write(
    directory: Path, model: sentencepiece.SentencePieceProcessor, settings: dict[str, object]
) -> Path:
    (directory / "tokenizer.model").write_bytes(model.serialized_model_proto())
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def test_ids_equal_sentencepiece(
    reference: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path, reference, {"eos_token": "</s>"}))
    assert tokenizer.vocab_size == VOCAB and tokenizer.eos_token_ids == (EOS,)
    for text in texts(1500, seed=5):
        ids = reference.encode(text)
        assert tokenizer.encode(text) == [BOS, *ids], repr(text)
        assert tokenizer.decode_tokens(ids) == reference.decode(ids), repr(text)


def test_settings_and_added_tokens(
    reference: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    added = {str(VOCAB): {"content": "<|assistant|>", "special": True, "normalized": False}}
    settings = {"add_bos_token": False, "add_eos_token": True, "added_tokens_decoder": added}
    tokenizer = Tokenizer.from_directory(write(tmp_path, reference, settings))
    assert tokenizer.encode("ab") == [*reference.encode("ab"), EOS]
    assert VOCAB in tokenizer.special_ids


def test_no_space_before_the_text(tmp_path: Path) -> None:
    model = train(add_dummy_prefix=False)  # as in Gemma
    tokenizer = Tokenizer.from_directory(write(tmp_path, model, {}))
    for text in texts(300, seed=6):
        assert tokenizer.encode(text) == [BOS, *model.encode(text)], repr(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_type": "unigram"}, "a SentencePiece unigram model; only BPE is supported here"),
        ({"normalization_rule_name": "nmt_nfkc"}, "normalises text"),
        ({"remove_extra_whitespaces": True}, "normalises text"),
    ],
)
def test_other_models_are_rejected_by_name(
    options: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=words):
        Tokenizer.from_directory(write(tmp_path, train(**options), {}))


def test_damaged_files_are_rejected_or_read(
    reference: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    whole = reference.serialized_model_proto()
    rng = random.Random(7)
    damaged = [b"", b"\0", b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x7f", whole[:-3], whole[: 1 << 12]]
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        damaged.append(bytes(data))
    rejected = 0
    for data in damaged:
        (tmp_path / "tokenizer.model").write_bytes(data)
        try:
            Tokenizer.from_directory(tmp_path)
        except ModelLoadError:
            rejected += 1
    assert rejected >= 5
