"""The bad_words automaton equals a search of every word at a cost independent of their number."""

from __future__ import annotations

import numpy as np
import pytest
from engine_fakes import make_engine
from hypothesis import given
from hypothesis import strategies as st

from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import SamplingParams
from llaisys.common.types import NewSequence
from llaisys.engine.input_processor import MAX_BAD_WORD_TOKENS
from llaisys.engine.worker.sampling_state import SamplingState
from llaisys.engine.worker.token_rules import START, WordAutomaton, automaton_of

TOKENS = st.integers(0, 3)
WORDS = st.lists(st.lists(TOKENS, min_size=2, max_size=5).map(tuple), max_size=12).map(tuple)


def naive_bans(words, tokens):
    """The last tokens of words whose other tokens end `tokens`."""
    found = set()
    for word in words:
        head = list(word[:-1])
        if tokens[len(tokens) - len(head) :] == head and len(tokens) >= len(head):
            found.add(word[-1])
    return found


@given(WORDS, st.lists(TOKENS, max_size=30))
def test_the_same_tokens_as_a_search_of_every_word(words, tokens):
    automaton = WordAutomaton(words)
    state = START
    for count, token in enumerate(tokens):
        assert set(automaton.banned(state)) == naive_bans(words, tokens[:count])
        state = automaton.step(state, token)
    assert set(automaton.banned(state)) == naive_bans(words, tokens)


def rows_with(words, prompt=3, sampled=()):
    rows = SamplingState(2, 64)
    seq = NewSequence(
        seq_id=1, request_id="r", token_ids=[1] * prompt + list(sampled), num_prompt_tokens=prompt,
        sampling=SamplingParams().with_defaults(None), seed=0, choice=0,
        stop_token_ids=frozenset(), bad_words=words,
    )  # fmt: skip
    rows.add(1, seq)
    return rows


def bans_of(rows, *sampled, prompt=3):
    """Return the tokens banned after `sampled`."""
    tokens = np.zeros((2, 32), dtype=np.int64)
    line = [1] * prompt + list(sampled)
    tokens[1, : len(line)] = line
    end = np.array([len(line)], dtype=np.int64)
    meta = rows.metadata(np.array([1]), np.array([0]), end, np.array([0, 1]), tokens)
    return set() if meta.bias_ids is None else set(meta.bias_ids.tolist())


def test_bad_words_match_sampled_tokens_only():
    rows = rows_with(((1, 1, 9), (1, 8)))
    assert bans_of(rows) == set()  # the prompt ends with 1 1
    assert bans_of(rows, 1) == {8} and bans_of(rows, 1, 1) == {8, 9}


def test_rolled_back_tokens_do_not_match():
    rows = rows_with(((5, 6, 7),))
    assert bans_of(rows, 5, 6) == {7}
    assert bans_of(rows, 5) == set() and bans_of(rows, 5, 6) == {7}
    assert bans_of(rows, 5, 6) == {7}  # asked twice in a step


def test_restarted_sequence_catches_up():
    rows = rows_with(((5, 6, 7),), sampled=(5, 6))
    assert bans_of(rows, 5, 6) == {7}


def test_choices_share_the_automaton():
    words = tuple((1, token) for token in range(200))
    assert automaton_of(words) is automaton_of(tuple(words))


class CountingDict(dict):
    """Counts lookups."""

    asked = 0

    def __contains__(self, key):
        type(self).asked += 1
        return super().__contains__(key)


@pytest.mark.parametrize("count", [1, 256])
def test_a_token_costs_the_same_however_many_words_there_are(count):
    automaton = WordAutomaton(tuple((1, 2, 3, 4, 100 + i) for i in range(count)))
    automaton._next = [CountingDict(following) for following in automaton._next]
    CountingDict.asked = 0
    state = START
    for token in [1, 2, 3, 4, 9] * 20:
        state = automaton.step(state, token)
    assert CountingDict.asked <= 300


def test_too_many_bad_word_tokens_are_rejected():
    engine = make_engine()
    words = [f"{i:03d}" + "x" * 200 for i in range(200)]
    with pytest.raises(InvalidInputError) as e:
        engine.submit([1, 2], SamplingParams(bad_words=words))
    assert e.value.field == "bad_words" and e.value.value > MAX_BAD_WORD_TOKENS
