"""Structured output: every kind of constraint, combined with other request options."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from chat_templates import QWEN_TOKENS
from error_helpers import invalid_input
from model_files import tiny_config, write_gguf, write_hf_model, write_tiny_tokenizer
from schema_maker import SchemaMaker
from speculation import NothingCosts

from llaisys import LLM, SamplingParams

COUNT = int(os.environ.get("LLAISYS_TEST_SCHEMAS", "60"))  # of random schemas
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GBNF = """
root ::= greeting " " name+
greeting ::= "hi" | "hello"
name ::= [a-c]{2} "."
"""
LARK = "start: pair+\npair: /[a-b]/ DIGIT\nDIGIT: /[0-9]/\n"
TAGS = {
    "structures": [
        {
            "begin": "<f>",
            "schema": {
                "type": "object",
                "properties": {"v": {"enum": [1, 2]}},
                "required": ["v"],
                "additionalProperties": False,
            },
            "end": "</f>",
        }
    ],
    "triggers": ["<f"],
}
FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "choice": ({"choice": ["yes", "no", "größer"]}, re.compile("yes|no|größer").fullmatch),
    "regex": ({"regex": "[0-9]{3}-[a-z]{1,9}"}, re.compile("[0-9]{3}-[a-z]{1,9}").fullmatch),
    "anchored": ({"regex": "^(ab|cd){2}$"}, re.compile("(ab|cd){2}").fullmatch),
    "gbnf": ({"grammar": GBNF}, re.compile(r"(hi|hello) ([a-c]{2}\.)+").fullmatch),
    "lark": ({"grammar": LARK}, re.compile("([ab][0-9])+").fullmatch),
    "json": ({"json": PERSON}, lambda text: fits(text, PERSON)),
    "compact": (
        {"json": PERSON, "disable_any_whitespace": True},
        lambda text: fits(text, PERSON) and not re.search(r"[\n\t]", text),
    ),
    "json_object": ({"json_object": True}, lambda text: fits(text, {"type": "object"})),
}


def fits(text: str, schema: Any) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("structured") / "model"
    write_hf_model(path, tiny_config(num_attention_heads=8, num_key_value_heads=4))
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), max_num_seqs=16, max_model_len=512) as llm:
        yield llm


def params(form: dict[str, Any], **more: Any) -> SamplingParams:
    chosen = {"temperature": 0.8, "seed": 1, "max_tokens": 300, **more}
    return SamplingParams(structured_outputs=form, **chosen)


def tokens(outputs: Any) -> list[list[int]]:
    return [list(choice.token_ids) for output in outputs for choice in output.outputs]


MIXED = [params(form, seed=seed) for seed, (form, _) in enumerate(FORMS.values())]
MIXED += [SamplingParams(temperature=0.8, seed=9, max_tokens=40, ignore_eos=True)]
PROMPTS = [[5 + i, 6, 7] * (1 + i % 3) for i in range(len(MIXED))]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    """The tokens of the mixed requests, one at a time."""
    pairs = zip(PROMPTS, MIXED, strict=True)
    return [tokens(llm.generate([prompt], given))[0] for prompt, given in pairs]


@pytest.mark.parametrize("name", FORMS)
def test_finished_answer_matches_its_constraint(llm: LLM, name: str) -> None:
    form, is_good = FORMS[name]
    finished = 0
    for output in llm.generate(["tell"] * 6, [params(form, seed=seed) for seed in range(6)]):
        choice = output.outputs[0]
        if choice.finish_reason == "stop":
            finished += 1
            assert is_good(choice.text), choice.text
        else:
            assert choice.finish_reason == "length" and len(choice.token_ids) == 300
    assert finished >= (1 if name == "json_object" else 4)


def test_structural_tags_enforce_their_schemas(llm: LLM) -> None:
    choice = llm.generate(["x"], params({"structural_tag": TAGS}, max_tokens=200))[0].outputs[0]
    for inside in re.findall("<f(.*?)</f>", choice.text, re.DOTALL):
        assert json.loads(inside.removeprefix(">")) in ({"v": 1}, {"v": 2})


def test_truncated_answer_has_finish_reason_length(llm: LLM) -> None:
    choice = llm.generate(["x"], params({"regex": "a{50}"}, max_tokens=10))[0].outputs[0]
    assert choice.finish_reason == "length" and choice.text == "a" * 10


def test_nothing_but_the_end_comes_after_a_complete_answer(llm: LLM) -> None:
    given = params({"choice": ["ab"]}, min_tokens=30, max_tokens=40)
    choice = llm.generate(["x"], given)[0].outputs[0]
    assert choice.text == "ab" and choice.finish_reason == "stop"
    given = params({"choice": ["ab"]}, ignore_eos=True, max_tokens=10)
    choice = llm.generate(["x"], given)[0].outputs[0]
    assert choice.text == "ab" and len(choice.token_ids) == 10


def test_batch_does_not_change_tokens(llm: LLM, expected: list[list[int]]) -> None:
    assert tokens(llm.generate(PROMPTS, MIXED)) == expected


def test_choices_differ_and_are_reproducible(llm: LLM) -> None:
    given = params({"json": PERSON}, n=4, seed=3)
    first = llm.generate(["x"], given)[0]
    again = llm.generate(["x"], given)[0]
    texts = [choice.text for choice in first.outputs]
    assert len(set(texts)) > 1 and texts == [choice.text for choice in again.outputs]
    assert all(fits(c.text, PERSON) for c in first.outputs if c.finish_reason == "stop")


def test_a_stream_is_the_whole_answer(llm: LLM) -> None:
    given = params({"json": PERSON}, seed=4)
    whole = llm.generate(["x"], given)[0].outputs[0]
    parts = list(llm.stream("x", given))
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.token_ids] == whole.token_ids


def test_logprobs_are_those_of_the_model_itself(llm: LLM) -> None:
    form = {"regex": "[0-9]{6}"}
    plain = llm.generate(["x"], params(form))[0].outputs[0]
    choice = llm.generate(["x"], params(form, logprobs=3))[0].outputs[0]
    assert choice.token_ids == plain.token_ids and len(choice.logprobs) == len(choice.token_ids)
    assert all(len(entry.top) == 3 for entry in choice.logprobs)
    assert any(entry.token_id not in dict(entry.top) for entry in choice.logprobs)


def test_stop_string_ends_the_request(llm: LLM) -> None:
    form = {"regex": "[a-c]{60}"}
    whole = llm.generate(["x"], params(form))[0].outputs[0].text
    choice = llm.generate(["x"], params(form, stop=[whole[7:10]]))[0].outputs[0]
    assert choice.text == whole[: whole.index(whole[7:10])]
    assert choice.finish_reason == "stop" and choice.stop_reason == whole[7:10]


def test_structured_output_respects_other_token_limits(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    allowed = [tokenizer.encode(c, False)[0] for c in "abc123"] + list(tokenizer.eos_token_ids)
    choice = llm.generate(["x"], params({"regex": "[a-z]{5}[0-9]{5}"}, allowed_token_ids=allowed))
    assert re.fullmatch("[abc]{5}[123]{5}", choice[0].outputs[0].text)


def test_request_without_an_allowed_token_ends_alone(llm: LLM) -> None:
    given = [params({"regex": "a+"}, bad_words=["a"]), params({"regex": "b{4}"})]
    failed, good = llm.generate(["x", "x"], given)
    assert failed.outputs[0].finish_reason == "error"
    assert good.outputs[0].text == "bbbb"


def test_preemption_changes_nothing(model: Path, llm: LLM) -> None:
    given = [params({"regex": "([a-f]{3}-){40}"}, seed=seed) for seed in range(4)]
    expected = tokens(llm.generate(["x"] * 4, given))
    with LLM(str(model), num_kv_blocks=64, block_size=4, max_model_len=200) as small:
        assert tokens(small.generate(["x"] * 4, given)) == expected
        assert small.stats()["num_preemptions"] > 0


def test_small_chunks_change_nothing(model: Path, expected: list[list[int]]) -> None:
    with LLM(str(model), max_num_batched_tokens=16, max_num_seqs=12, max_model_len=512) as llm:
        assert tokens(llm.generate(PROMPTS, MIXED)) == expected


def test_drafts_change_nothing(model: Path, expected: list[list[int]]) -> None:
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 6}
    with LLM(str(model), max_num_seqs=16, max_model_len=512, speculative_config=drafts) as llm:
        llm.llm_engine.core.speculator.costs = NothingCosts()
        pairs = zip(PROMPTS, MIXED, strict=True)
        assert [tokens(llm.generate([p], given))[0] for p, given in pairs] == expected
        repeating = params({"regex": "(ab){60}"}, max_tokens=200)
        assert llm.generate(["abab"], repeating)[0].outputs[0].text == "ab" * 60
        assert llm.stats()["spec_decode_num_accepted_tokens"] > 20


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_ranks_sample_the_same_tokens(model: Path, expected: list[list[int]], backend: str) -> None:
    with LLM(
        str(model),
        tensor_parallel_size=2,
        distributed_executor_backend=backend,
        max_num_seqs=16,
        max_model_len=512,
        n_threads=1,
    ) as llm:
        assert tokens(llm.generate(PROMPTS, MIXED)) == expected


def test_gguf_vocabularies_work(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    with LLM(str(path), max_model_len=128) as llm:
        assert llm.generate(["x"], params({"choice": ["hello"]}))[0].outputs[0].text == "hello"


def test_model_without_tokenizer_reports_it() -> None:
    with LLM("mock") as llm, invalid_input("structured_outputs"):
        llm.generate([[1, 2]], params({"regex": "a"}))


def test_vocabulary_without_bytes_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_hf_model(path, tiny_config())
    settings = json.loads((path / "tokenizer.json").read_text())
    settings["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (path / "tokenizer.json").write_text(json.dumps(settings))
    with LLM(str(path)) as llm, invalid_input("structured_outputs.regex"):
        llm.generate(["x"], params({"regex": "a"}))


@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "prompt_lookup_min": 1}])
def test_grammar_applies_after_reasoning_opened_by_the_prompt(tmp_path: Path, drafts: Any) -> None:
    path = tmp_path / "model"
    write_hf_model(path, tiny_config())
    write_tiny_tokenizer(path, more=QWEN_TOKENS)
    with LLM(str(path), max_model_len=256, speculative_config=drafts) as llm:
        start, end = (llm.tokenizer.token_id(mark) for mark in ("<think>", "</think>"))
        for budget, seed in ((5, 1), (30, 2), (60, 3)):
            given = params({"regex": "(ab){20}"}, thinking_budget=budget, seed=seed)
            output = llm.generate([[9, start]], given)[0].outputs[0]
            place = output.token_ids.index(end)
            assert place <= budget
            answer = llm.tokenizer.decode_tokens(output.token_ids[place + 1 :])
            assert answer.lstrip("\n") == "ab" * 20
        closed = llm.generate([[9, start, 8, end]], params({"regex": "(ab){20}"}))
        assert closed[0].outputs[0].text == "ab" * 20


def test_random_schemas_are_enforced(llm: LLM) -> None:
    """Every finished answer validates."""
    schemas = [SchemaMaker(seed).schema() for seed in range(COUNT)]
    given = [
        params({"json": schema, "disable_any_whitespace": seed % 2 == 0}, seed=seed)
        for seed, schema in enumerate(schemas)
    ]
    finished = 0
    checks = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for schema, output in zip(schemas, llm.generate(["{"] * COUNT, given), strict=True):
        choice = output.outputs[0]
        assert choice.finish_reason in ("stop", "length"), choice.error
        if choice.finish_reason == "stop":
            finished += 1
            validator = jsonschema.Draft202012Validator(schema, format_checker=checks)
            validator.validate(json.loads(choice.text))
    assert finished >= 0.9 * COUNT, finished
