"""The contract of `LLM`: accepted and rejected input, and how its methods work together."""

from __future__ import annotations

import subprocess
import sys

import pytest
from engine_fakes import (
    FakeAdapter,
    FakeTokenizer,
    adapter_of,
    expected_tokens,
    greedy,
    is_idle,
    make_llm,
)
from error_helpers import invalid_input
from model_files import write_hf_model

import llaisys
from llaisys import LLM, SamplingParams
from llaisys.common.errors import ClosedError, InvalidInputError
from llaisys.engine.input_processor import normalize_message


@pytest.fixture
def llm():
    with make_llm() as llm:
        yield llm


def test_one_prompt_or_many_text_or_ids(llm):
    params = greedy(4, ignore_eos=True)
    tokens = expected_tokens(list(b"hey"), 4, stops=())
    for prompts in ("hey", ["hey"], list(b"hey"), [list(b"hey")], (104, 101, 121)):
        (output,) = llm.generate(prompts, params)
        assert output.token_ids == tokens
    both = llm.generate(["hey", list(b"hey")], params)
    assert [output.token_ids for output in both] == [tokens, tokens]
    assert both[0].prompt == "hey" and both[1].prompt is None


def test_numpy_ids_are_accepted(llm):
    import numpy as np

    ids = np.array([1, 2, 3])
    assert llm.generate(ids, greedy(3))[0].token_ids == expected_tokens([1, 2, 3], 3)
    assert llm.generate([ids, ids], greedy(3))[1].token_ids == expected_tokens([1, 2, 3], 3)


def test_numbers_that_are_not_ids_are_rejected(llm):
    import numpy as np

    floats = np.array([1.9, 2.7])
    for prompt in (floats, floats.astype(np.float32), np.array([True, False]), [True], [1, 2.0]):
        with pytest.raises(
            InvalidInputError, check=lambda error: error.field.startswith("prompt[")
        ):
            llm.generate(prompt, greedy(1))
    assert is_idle(llm)


def test_parameters_for_all_or_for_each(llm):
    outputs = llm.generate([[1], [2], [3]], [greedy(1), greedy(2), None])
    assert len(outputs[0].token_ids) == 1 and len(outputs[1].token_ids) <= 2
    with invalid_input("sampling_params"):
        llm.generate([[1], [2], [3]], [greedy(1)] * 2)
    with invalid_input("sampling_params"):
        llm.generate([[1]], {"temperature": 0})


def test_chat_renders_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, greedy(3))
    assert output.prompt_token_ids == list(b"[user]hi[assistant]")
    two = llm.chat([messages, messages], greedy(3))
    assert [o.token_ids for o in two] == [output.token_ids] * 2
    parts = list(llm.stream(messages, greedy(3)))
    assert parts[-1].output.token_ids == output.token_ids
    for bad in ("hi", [], {}):
        with invalid_input("messages"):
            llm.chat(bad)


def test_chat_accepts_text_parts_as_the_server_does(llm):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "three"},
    ]
    text = b"[user]one\ntwo[assistant][user]three[assistant]"
    assert llm.encode_chat(messages) == list(text)
    assert llm.chat(messages, greedy(1))[0].prompt_token_ids == list(text)
    assert next(llm.stream(messages, greedy(1))).output is not None
    assert messages[0]["content"] is parts  # the caller's own are left alone


def test_tool_call_keeps_missing_content() -> None:
    """Templates distinguish a call from an answer by None."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}
    assert normalize_message(call, 0) == call
    assert normalize_message({"role": "assistant", "content": None}, 0)["content"] == ""


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user"}, "messages[1].content is missing; it must be text"),
        ({"role": "user", "content": None}, "messages[1].content is missing; it must be text"),
        ({"role": "user", "content": 5}, "messages[1].content is of type int; it must be text"),
        ({"role": "user", "content": {"text": "x"}}, "messages[1].content is of type dict"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[1].content is a list with more than text in it; it must be text",
        ),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content is"),
        ("hi", "messages[1] is 'hi'; it must be {'role', 'content'}"),
    ],
    ids=str,
)
def test_chat_content_that_is_not_text_is_rejected(llm, message, text):
    with pytest.raises(InvalidInputError) as caught:
        llm.chat([{"role": "user", "content": "hi"}, message])
    assert text in str(caught.value)
    assert is_idle(llm)


def test_submit_step_collect_cancel(llm):
    first = llm.submit([1, 2], greedy(3, ignore_eos=True))
    second = llm.submit([3, 4], greedy(30, ignore_eos=True), request_id="mine", stream=True)
    assert second == "mine" and llm.collect(first) is None
    seen = []
    for _ in range(3):
        seen += [(part.request_id, part.finish_reason) for part in llm.step()]
    assert seen == [("mine", None)] * 2 + [(first, "length"), ("mine", None)]
    assert llm.collect(first).token_ids == expected_tokens([1, 2], 3, stops=())
    assert llm.collect(first) is None
    assert llm.cancel("mine") is True
    assert llm.cancel("mine") is False and llm.cancel("unknown") is False
    output = llm.collect("mine")
    assert output.finish_reason == "abort" and len(output.token_ids) == 3
    assert llm.step() == [] and is_idle(llm)


def test_cancelling_a_stream_from_outside_ends_it(llm):
    stream = llm.stream([1, 2], greedy(30, ignore_eos=True))
    part = next(stream)
    llm.cancel(part.request_id)
    (last,) = list(stream)
    assert last.finish_reason == "abort" and last.output is not None
    assert is_idle(llm)


def test_stream_without_references_is_cancelled(llm):
    stream = llm.stream([1, 2], greedy(30, ignore_eos=True))
    assert llm.has_unfinished()
    del stream
    assert is_idle(llm)
    with llm.stream([1, 2], greedy(30, ignore_eos=True)) as stream:
        next(stream)
    assert is_idle(llm) and next(stream, None) is None


def test_stream_checks_its_prompt_at_once(llm):
    with pytest.raises(InvalidInputError):
        llm.stream([])


@pytest.mark.parametrize(
    ("prompts", "params", "text"),
    [
        ([], None, "prompts has 0 prompts; it must have at least 1"),
        ("", None, "prompt has 0 tokens; it must have at least 1"),
        ([[]], None, "prompt has 0 tokens; it must have at least 1"),
        ([[1, 512]], None, "prompt[1] is 512; it must be an integer from 0 to 511"),
        ([[1, -1]], None, "prompt[1] is -1"),
        ([1.5], None, "prompt[0] is 1.5; it must be an integer"),
        ([list(range(1, 400)) * 2], None, "prompt has 798 tokens"),
        ([[1] * 600], None, "it must have at most 511, as max_model_len holds beside a new token"),
        (None, None, "prompts is None; it must be a string, a list of token ids"),
        ({"prompt": "x"}, None, "prompts is {'prompt': 'x'}; it must be a string"),
        ([[1]], SamplingParams(logit_bias={600: 1.0}), "is 600; it must be an integer from 0"),
    ],
    ids=str,
)
def test_invalid_input_is_rejected_with_the_numbers(llm, prompts, params, text):
    other = llm.submit([7, 8], greedy(2, ignore_eos=True))
    with pytest.raises(InvalidInputError) as caught:
        llm.generate(prompts, params)
    assert text in str(caught.value)
    while llm.has_unfinished():
        llm.step()
    assert llm.collect(other).token_ids == expected_tokens([7, 8], 2, stops=())
    assert is_idle(llm)


def test_typos_are_type_errors():
    with pytest.raises(TypeError, match="max_modle_len"):
        LLM(max_modle_len=5)
    with pytest.raises(TypeError):
        LLM("model", "bf16")  # only the model may stand without its name


def test_invalid_settings_are_rejected_before_loading():
    with invalid_input("max_num_seqs"):
        make_llm(max_num_seqs=0)
    with invalid_input("adapter_class"):
        make_llm(distributed_executor_backend="ray")


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"num_kv_blocks": 1 << 22}, 1 << 22),
        ({"max_model_len": 10**6}, 10**6),
        ({"tensor_parallel_size": 65}, 65),
        ({"tensor_parallel_size": 3}, 3),
        ({"device": "abacus"}, "abacus"),
    ],
)
def test_settings_beyond_library_limits_are_rejected_by_name(tmp_path, options, value):
    write_hf_model(tmp_path, tokenizer=False)
    with pytest.raises(InvalidInputError) as caught:
        LLM(str(tmp_path), **options)
    error = caught.value
    assert (error.field, error.value) == (next(iter(options)), value) and error.limit


def test_text_needs_a_tokenizer():
    with make_llm(tokenizer=None) as llm:
        with invalid_input("prompt"):
            llm.generate("hi")
        with invalid_input("stop"):
            llm.generate([[1]], SamplingParams(stop="x"))
        with invalid_input("tokenizer"):
            llm.tokenize("hi")
        (output,) = llm.generate([[1, 2]], greedy(3))
        assert output.token_ids == expected_tokens([1, 2], 3) and output.text == ""


def test_tokenize_and_model_path(llm):
    chat = [{"role": "user", "content": "x"}]
    assert llm.encode_chat(chat, add_generation_prompt=False) == list(b"[user]x")
    assert llm.tokenize("abc") == [97, 98, 99] and llm.detokenize([97, 98]) == "ab"
    assert llm.model_path == "FakeAdapter"
    assert llm.model_info.num_blocks == 128


def test_use_after_close_and_close_twice():
    llm = make_llm()
    adapter = adapter_of(llm.llm_engine)
    stream = llm.stream([1, 2], greedy(5))
    llm.close()
    llm.close()
    assert adapter.closed
    for call in (
        lambda: llm.generate("x"),
        lambda: llm.stream("x"),
        lambda: llm.submit("x"),
        lambda: llm.cancel("x"),
        lambda: llm.tokenize("x"),
        lambda: llm.model_path,
        llm.step,
        llm.stats,
    ):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(ClosedError):
        next(stream)
    assert list(stream) == []


def test_an_engine_that_cannot_load_frees_its_worker():
    made = []

    class Broken(FakeAdapter):
        def __init__(self, options):
            super().__init__(options)
            made.append(self)

        def forward(self, step, attention):
            raise RuntimeError("cannot warm up")

    with pytest.raises(RuntimeError):
        make_llm(adapter_class=Broken)
    assert made[0].closed


def test_a_broken_tokenizer_frees_the_model():
    made = []

    class Watched(FakeAdapter):
        def __init__(self, options):
            super().__init__(options)
            made.append(self)

    class BrokenTokenizer(FakeTokenizer):
        @property
        def eos_token_ids(self):
            raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        make_llm(adapter_class=Watched, tokenizer=BrokenTokenizer())
    assert made[0].closed


def test_progress_bar(llm, capsys):
    llm.generate([[1], [2]], greedy(2), use_tqdm=True)
    assert "2/2" in capsys.readouterr().err


def test_import_is_light():
    program = (
        "import sys; before = set(sys.modules); import llaisys; "
        "print(*set(sys.modules) - before); assert llaisys.__version__; llaisys.SamplingParams; "
        "assert not {'numpy', 'tokenizers', 'msgspec', 'asyncio'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert len(done.stdout.split()) < 10


def test_exports():
    names = {"LLM", "SamplingParams", "BeamSearchParams", "StructuredOutputs"}
    names |= {"register_family", "__version__"}
    assert set(llaisys.__all__) == names == set(dir(llaisys))
    with pytest.raises(AttributeError, match="no attribute 'LLm'"):
        llaisys.LLm  # noqa: B018
