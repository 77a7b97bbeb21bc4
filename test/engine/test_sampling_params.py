"""SamplingParams: checked once, errors name the field, the value and the limit."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from error_helpers import invalid_input
from hypothesis import example, given
from hypothesis import strategies as st

from llaisys.common.errors import InvalidInputError
from llaisys.common.sampling import DEFAULT_SAMPLERS, FIELDS, NEUTRAL, SamplingParams
from llaisys.common.step import ROW_NUMBERS

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("n", 0, "an integer from 1 to 128"),
        ("n", 129, "an integer from 1 to 128"),
        ("n", True, "an integer"),
        ("n", 1.0, "an integer"),
        ("temperature", -0.1, "from 0 to 100"),
        ("temperature", NAN, "a finite number from 0 to 100"),
        ("temperature", INF, "a finite number"),
        ("temperature", "1", "a finite number"),
        ("temperature", True, "a finite number"),
        ("top_p", 0.0, "above 0 to 1"),
        ("top_p", 1.1, "above 0 to 1"),
        ("top_p", NAN, "above 0 to 1"),
        ("top_p", 1e-46, "from 1.17549e-38 to 1"),  # 0 in the sampler's f32
        ("top_k", -2, "an integer from -1"),
        ("top_k", 1.5, "an integer"),
        ("top_k", 1 << 31, "an integer from -1 to 2147483647"),
        ("min_p", -0.1, "from 0 to 1"),
        ("min_p", 1.1, "from 0 to 1"),
        ("repetition_penalty", 0, "above 0 to 100"),
        ("repetition_penalty", INF, "above 0"),
        ("repetition_penalty", 1e-46, "from 1.17549e-38 to 100"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("presence_penalty", NAN, "from -2 to 2"),
        ("frequency_penalty", -2.1, "from -2 to 2"),
        ("seed", -1, "an integer from 0 to 18446744073709551615"),
        ("seed", 1 << 64, "an integer from 0"),
        ("max_tokens", -1, "an integer from 0"),
        ("max_tokens", -5, "an integer from 0"),
        ("min_tokens", -1, "an integer from 0"),
        ("logprobs", -2, "an integer from -1 to 2147483647"),
        ("logit_bias", [1], "a mapping"),
        ("logit_bias", {-1: 1.0}, "a token id of logit_bias is -1"),
        ("logit_bias", {"x": 1.0}, "a token id of logit_bias is 'x'"),
        ("logit_bias", {1: 101.0}, "from -100 to 100"),
        ("logit_bias", {1: NAN}, "a finite number"),
        ("logit_bias", {i: 0.0 for i in range(1025)}, "1025 entries; it must have at most 1024"),
        ("bad_words", ["x"] * 257, "257 strings; it must have at most 256"),
        ("bad_words", [""], "bad_words[0] has 0 characters; it must have at least 1"),
        ("bad_words", 3, "a string or a list"),
        ("allowed_token_ids", [], "has 0 ids; it must have at least 1"),
        ("allowed_token_ids", [-3], "allowed_token_ids[0] is -3"),
        ("allowed_token_ids", "12", "a list of token ids"),
        ("stop", ["x" * 1025], "stop[0] has 1025 characters; it must have at most 1024"),
        ("stop", ["x"] * 10_000, "10000 strings; it must have at most 64"),
        ("stop", [""], "stop[0] has 0 characters"),
        ("stop", [3], "a string"),
        ("stop", {"a": 1}, "a string or a list"),
        ("stop_token_ids", [1.5], "an integer"),
        ("stop_token_ids", list(range(1025)), "1025 ids; it must have at most 1024"),
        ("ignore_eos", 1, "true or false"),
        ("detokenize", "no", "true or false"),
        ("skip_special_tokens", None, "true or false"),
        ("include_stop_str_in_output", 0, "true or false"),
        ("samplers", ["top_k", "hot"], "samplers[1] is 'hot'; it must be one of penalties"),
        ("samplers", ["top_k", "top_k"], "without repetition"),
        ("samplers", 7, "a list of names"),
    ],
)
def test_rejected(field, value, limit):
    with pytest.raises(InvalidInputError) as caught:
        SamplingParams(**{field: value})
    text = str(caught.value)
    assert field in text and limit in text
    assert len(text) < 300


def test_min_tokens_above_max_tokens():
    with invalid_input("min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=3)


def test_unknown_names_and_positions_are_type_errors():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)
    with pytest.raises(TypeError):
        SamplingParams(3)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 2.0


def test_one_stop_string_is_one_string():
    assert SamplingParams(stop="abc").stop == ("abc",)
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")
    assert SamplingParams().stop == () == SamplingParams(stop=None).stop
    assert SamplingParams(bad_words="abc").bad_words == ("abc",)


def test_stop_strings_need_text():
    with invalid_input("detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_default_samples_and_zero_is_greedy():
    assert not SamplingParams().with_defaults(None).greedy
    assert SamplingParams().with_defaults(None).temperature == 1.0
    assert SamplingParams(temperature=0).greedy


def test_numpy_numbers_and_json_keys_are_accepted():
    params = SamplingParams(
        top_k=np.int64(5), temperature=np.float32(0.5), logit_bias={"7": 1, np.int32(8): 2}
    )
    assert params.top_k == 5 and type(params.top_k) is int and type(params.temperature) is float
    assert params.bias_items == ((7, 1.0), (8, 2.0)) and params.logit_bias == {7: 1.0, 8: 2.0}


def test_top_k_minus_one_is_all():
    assert SamplingParams(top_k=-1).top_k == 0


def test_model_defaults_fill_only_unset_fields():
    model = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": None}
    params = SamplingParams(top_p=1.0).with_defaults(model)
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 1.0, 20)
    assert (params.min_p, params.repetition_penalty) == (0.0, 1.0)
    plain = SamplingParams().with_defaults({})
    assert {name: getattr(plain, name) for name in NEUTRAL} == NEUTRAL
    assert plain.with_defaults(model) is plain


def test_uses_penalties():
    assert not SamplingParams().uses_penalties
    assert not SamplingParams(repetition_penalty=1.0).uses_penalties
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 0.5}).uses_penalties


def test_sampler_order():
    assert SamplingParams(samplers="temperature;top_k").samplers == ("temperature", "top_k")
    assert SamplingParams(samplers=[]).samplers == ()
    assert SamplingParams(samplers=list(DEFAULT_SAMPLERS)).samplers == DEFAULT_SAMPLERS


def test_clone_validates():
    params = SamplingParams(max_tokens=3, logit_bias={1: 2.0}, stop="x")
    copy = params.clone(max_tokens=4)
    assert copy.max_tokens == 4 and copy.bias_items == params.bias_items and copy.stop == ("x",)
    with pytest.raises(InvalidInputError):
        params.clone(max_tokens=-1)
    assert SamplingParams(**params.to_dict()) == params


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.floats()), max_size=4),
    st.dictionaries(st.one_of(st.integers(), st.text(max_size=3)), st.floats(), max_size=3),
)


@example("repetition_detection", {0: 0.0})
@given(st.sampled_from([f.name for f in dataclasses.fields(SamplingParams) if f.init]), ANYTHING)
def test_any_value_is_accepted_or_raises_value_error(name, value):
    try:
        params = SamplingParams(**{name: value})
    except InvalidInputError as error:
        assert name in str(error)
    else:
        assert params.with_defaults(None).clone() == params.with_defaults(None)


def test_every_field_is_in_the_table_with_a_valid_default():
    names = [f.name for f in dataclasses.fields(SamplingParams)]
    assert list(FIELDS) == names and all(about.help for about in FIELDS.values())
    for name, about in FIELDS.items():
        assert about.kind.json_schema()
        if about.from_model:
            assert getattr(SamplingParams(), name) is None
            assert about.kind.check(name, about.neutral) == about.neutral


def test_the_samplers_arrays_are_those_of_the_table():
    """A new number needs a row of the table, and one of this name in the C++ table. The worker
    computes one more, the state of mirostat."""
    arrays = {about.array: about.neutral for about in FIELDS.values() if about.array}
    assert {**arrays, "mirostat_mu": ROW_NUMBERS["mirostat_mu"]} == ROW_NUMBERS
    assert arrays["n_logprobs"] == -1 and arrays["temperature"] == 1.0
