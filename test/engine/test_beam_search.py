"""Beam search against a naive search over the same model's logprobs."""

from __future__ import annotations

import pytest
from error_helpers import invalid_input

from llaisys import LLM, BeamSearchParams, SamplingParams
from llaisys.common.errors import InvalidInputError
from llaisys.common.types import CompletionOutput, RequestOutput, TokenLogprobs
from llaisys.engine.beam_search import BeamSearch

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def llm():
    with LLM(model_type="mock", max_model_len=256, block_size=4) as found:
        yield found


def naive(llm, width, max_tokens, penalty, eos):
    """vLLM's loop without its early end, one prompt at a time."""
    beams, done = [((), 0.0)], []
    step = SamplingParams(max_tokens=1, temperature=0, logprobs=2 * width, ignore_eos=True)

    def score(entry):
        tokens, total = entry
        length = len(tokens) - (tokens[-1] in eos)
        return total / max(1, length) ** penalty

    for _ in range(max_tokens):
        longer = []
        for tokens, total in beams:
            found = llm.generate([[*PROMPT, *tokens]], step)[0].outputs[0].logprobs[0]
            for token, logprob in found.top:
                entry = ((*tokens, token), total + logprob)
                (done if token in eos else longer).append(entry)
        beams = sorted(longer, key=score, reverse=True)[:width]
    return sorted([*done, *beams], key=score, reverse=True)[:width]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.5])
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_the_same_beams_as_a_naive_search(llm, width, penalty, ignore_eos):
    eos = set() if ignore_eos else set(llm.model_info.eos_token_ids)
    expected = naive(llm, width, 6, penalty, eos)
    params = BeamSearchParams(width, 6, ignore_eos, length_penalty=penalty)
    (output,) = llm.beam_search([PROMPT], params)
    assert [tuple(beam.token_ids) for beam in output.outputs] == [tokens for tokens, _ in expected]
    for beam, (tokens, total) in zip(output.outputs, expected, strict=True):
        assert beam.cumulative_logprob == pytest.approx(total, abs=1e-5)
        assert beam.finish_reason == ("stop" if tokens[-1] in eos else "length")
        assert [entry.token_id for entry in beam.logprobs] == beam.token_ids


def step_output(*top, reason="length"):
    logprobs = [TokenLogprobs.of(top[0][0], top[0][1], 1, top)] if top else None
    output = CompletionOutput(0, finish_reason=reason, logprobs=logprobs)
    return RequestOutput("r", None, [1], [output])


def test_ends_when_no_beam_can_win():
    search = BeamSearch([1], BeamSearchParams(1, 100, length_penalty=1.0), frozenset({9}))
    search.advance([step_output((9, -0.045), (5, -4.0))])
    assert search.beams  # 100 tokens of probability 1 would score -0.04
    search.advance([step_output((5, -4.0), (9, -5.0))])
    assert not search.beams and search.finished[0].token_ids == (9,)


def test_cancelled_search_returns_its_beams():
    search = BeamSearch([1], BeamSearchParams(2, 100), frozenset())
    search.advance([step_output((5, -0.5), (6, -1.0))])
    search.advance([step_output(reason="abort"), step_output(reason="abort")])
    assert [beam.token_ids for beam in search.finished] == [(5,), (6,)]
    assert {beam.finish_reason for beam in search.finished} == {"abort"} and not search.beams


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("beam_width", {"beam_width": 11}),
        ("max_tokens", {"beam_width": 2, "max_tokens": 0}),
        ("length_penalty", {"beam_width": 2, "length_penalty": 11}),
    ],
)
def test_limits(field, values):
    with pytest.raises(InvalidInputError) as error:
        BeamSearchParams(**values)
    assert error.value.field == field


def test_prompt_must_leave_room(llm):
    with invalid_input("prompts"):
        llm.beam_search([[1] * 250], BeamSearchParams(2, 16))
