"""SentencePiece vocabularies in GGUF files: ids and texts equal to the sentencepiece library."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import model_files
import pytest
import sentencepiece
from error_helpers import naming
from sentencepiece_models import BOS, EOS, UNK, texts, train

from llaisys.common.errors import ModelLoadError
from llaisys.common.sampling import SamplingParams
from llaisys.entrypoints.llm import LLM
from llaisys.models.families import open_checkpoint
from llaisys.models.loading.gguf_reader import read_gguf_header
from llaisys.tokenization import BpeVocabulary, Tokenizer, TokenizerSource
from llaisys.tokenization.source import PackedStrings

FIRST_BYTE = 3
LLAMA2 = (
    "{% for m in messages %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' if m['role'] == 'user' "
    "else ' ' + m['content'] + '</s>' }}{% endfor %}"
)


def token_type(model: sentencepiece.SentencePieceProcessor, token_id: int) -> int:
    kinds = {2: model.is_unknown, 3: model.is_control, 5: model.is_unused, 6: model.is_byte}
    return next((kind for kind, test in kinds.items() if test(token_id)), 1)


def write(path: Path, model: sentencepiece.SentencePieceProcessor, **options: Any) -> Path:
    """Write the model's vocabulary to a GGUF file with the gguf library."""
    ids = range(model.vocab_size())

    def add(writer: Any, config: Mapping[str, Any]) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([model.id_to_piece(i) for i in ids])
        writer.add_token_scores([model.get_score(i) for i in ids])
        if options.get("types", True):
            writer.add_token_types([token_type(model, i) for i in ids])
        writer.add_unk_token_id(UNK)
        writer.add_bos_token_id(BOS)
        writer.add_eos_token_id(EOS)
        for name in ("add_bos_token", "add_eos_token", "add_space_prefix"):
            if name in options:
                getattr(writer, f"add_{name}")(options[name])
        writer.add_chat_template(LLAMA2)

    config = model_files.tiny_config("llama", vocab_size=model.vocab_size(), num_hidden_layers=1)
    model_files.write_gguf(path, config, add_tokenizer=add)
    return path


def open_tokenizer(path: Path) -> Tokenizer:
    with open_checkpoint(path) as checkpoint:
        return Tokenizer.from_source(checkpoint.tokenizer_source)


@pytest.fixture(scope="module")
def reference() -> sentencepiece.SentencePieceProcessor:
    return train()


@pytest.fixture(scope="module")
def model_path(
    reference: sentencepiece.SentencePieceProcessor, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return write(tmp_path_factory.mktemp("llama") / "m.gguf", reference)


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return open_tokenizer(model_path)


def test_ids_and_texts_equal_sentencepiece(
    reference: sentencepiece.SentencePieceProcessor, tokenizer: Tokenizer
) -> None:
    num_bytes = 0
    for text in texts(5000, seed=22):
        ids = reference.encode(text)
        assert tokenizer.encode(text) == [BOS, *ids], repr(text)
        assert tokenizer.decode_tokens(ids) == reference.decode(ids), repr(text)
        num_bytes += sum(reference.is_byte(i) for i in ids)
    assert num_bytes > 1000  # characters outside the vocabulary were among them


def test_token_bytes_join_to_the_text(tokenizer: Tokenizer) -> None:
    for text in texts(500, seed=23):
        ids = tokenizer.encode(text, add_special_tokens=False)
        expected = (" " + text if text else "").replace("\u2581", " ")
        assert b"".join(map(tokenizer.token_bytes, ids)) == expected.encode()


def test_incremental_text_keeps_the_first_space(tokenizer: Tokenizer) -> None:
    for text in texts(500, seed=24):
        stream = tokenizer.detokenizer()
        pieces = [stream.add(i) for i in tokenizer.encode(text)]
        assert "\ufffd" not in "".join(pieces) or "\ufffd" in text
        whole = "".join(pieces) + stream.finish()
        assert whole.removeprefix(" ") == tokenizer.decode_tokens(tokenizer.encode(text))
        assert whole.startswith(" ") or not text


def test_truncated_character_does_not_affect_adjacent_text(tokenizer: Tokenizer) -> None:
    byte_ids = [FIRST_BYTE + byte for byte in "é".encode() + b"\xe4\xbd"]
    assert tokenizer.decode_tokens([*byte_ids, *tokenizer.encode("a")]) == "é\ufffd a"


def test_prefix_settings_of_the_file_are_used(
    reference: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.gguf", reference, add_bos_token=False, add_eos_token=True)
    ids = reference.encode("Hello, 你好")
    assert open_tokenizer(path).encode("Hello, 你好") == [*ids, EOS]
    bare = train(add_dummy_prefix=False)
    tokenizer = open_tokenizer(write(tmp_path / "b.gguf", bare, add_space_prefix=False))
    for text in texts(500, seed=25):
        ids = bare.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)
        assert tokenizer.decode_tokens(ids) == bare.decode(ids), repr(text)


def test_token_types_are_inferred_when_missing(
    reference: sentencepiece.SentencePieceProcessor, tmp_path: Path
) -> None:
    tokenizer = open_tokenizer(write(tmp_path / "m.gguf", reference, types=False))
    for text in texts(300, seed=26):
        assert tokenizer.encode(text) == [BOS, *reference.encode(text)]


def test_control_tokens_come_from_the_template_only(
    reference: sentencepiece.SentencePieceProcessor, tokenizer: Tokenizer
) -> None:
    text = "</s> <s> <0x0A> <unk>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == reference.encode(text) and {BOS, EOS, UNK}.isdisjoint(ids)
    chat = tokenizer.encode_chat([{"role": "user", "content": text}])
    assert chat == [BOS, *reference.encode(f"[INST] {text} [/INST]")]
    assert tokenizer.eos_token_ids == (EOS,)


def test_space_prefix_is_added_after_control_tokens(
    reference: sentencepiece.SentencePieceProcessor, tokenizer: Tokenizer
) -> None:
    roles = ("user", "assistant", "user")
    messages = [{"role": r, "content": c} for r, c in zip(roles, "abc", strict=True)]
    first, second = reference.encode("[INST] a [/INST] b"), reference.encode("[INST] c [/INST]")
    assert tokenizer.encode_chat(messages) == [BOS, *first, EOS, BOS, *second]


def test_sentencepiece_model_generates(model_path: Path) -> None:
    with LLM(str(model_path), max_model_len=64) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        (output,) = llm.generate("Hello, 你好", params)
        ids = output.outputs[0].token_ids
        assert output.outputs[0].text.removeprefix(" ") == llm.detokenize(ids)


def test_invalid_scores_are_rejected() -> None:
    def build(tokens: tuple[str, ...], scores: tuple[float, ...]) -> Tokenizer:
        return Tokenizer.from_source(
            TokenizerSource(vocabulary=BpeVocabulary(PackedStrings.of(tokens), (), scores=scores))
        )

    assert build(("a", "b", "ab"), (0.0, 0.0, -1.0)).decode_tokens([2]) == "ab"
    with naming(ModelLoadError, "'b'"):
        build(("a", "b"), (0.0, float("nan")))
    with naming(ModelLoadError, "300"):
        build(("a", "a" * 300), (0.0, 0.0))


def test_damaged_files_raise_only_load_errors(model_path: Path, tmp_path: Path) -> None:
    good = model_path.read_bytes()
    header = min(t.offset for t in read_gguf_header(model_path).tensors.values())
    rng = random.Random(1)
    path = tmp_path / "m.gguf"
    for _ in range(100):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 30))):
            data[rng.randrange(header)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with contextlib.suppress(ModelLoadError):
            open_tokenizer(path).encode("Hello, 你好")
