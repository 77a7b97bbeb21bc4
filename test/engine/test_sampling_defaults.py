"""Defaults of sampling fields: the values of the model, those of the engine, or neutral ones."""

from __future__ import annotations

from engine_fakes import FakeTokenizer, adapter_of, make_engine
from error_helpers import invalid_input, naming

from llaisys.common.errors import ModelLoadError
from llaisys.common.sampling import DEFAULT_SAMPLING, NEUTRAL, SamplingParams, sampling_defaults
from llaisys.common.types import ModelInfo
from llaisys.engine.input_processor import InputProcessor
from llaisys.entrypoints.cli import build_parser
from llaisys.entrypoints.llm import LLM
from llaisys.server.config import ServerConfig
from llaisys.server.options import config_from_args

OURS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def model(**generation):
    return ModelInfo("m", "mock", 64, 512, (), 16, 16, generation_defaults=generation)


def used(info, params=None, defaults=None):
    """Return the sampling parameters of a request."""
    entry = InputProcessor(info, FakeTokenizer(), defaults=defaults).process([1], params)
    return {name: getattr(entry.params, name) for name in NEUTRAL}


def test_default_sampling_fields_are_in_the_table():
    assert DEFAULT_SAMPLING == OURS and set(OURS) <= set(NEUTRAL)
    SamplingParams(**DEFAULT_SAMPLING)


def test_model_defaults_precede_default_sampling():
    assert sampling_defaults({}) == OURS == sampling_defaults({"temperature": None})
    assert sampling_defaults({"temperature": 0.6}) == {"temperature": 0.6}
    assert sampling_defaults({"repetition_penalty": 1.1}) == OURS | {"repetition_penalty": 1.1}


def test_chosen_defaults_precede_model_defaults():
    chosen = {"top_k": 5, "samplers": ("top_k",)}
    assert sampling_defaults({"top_k": 20, "top_p": 0.8}, chosen) == {"top_p": 0.8} | chosen
    assert sampling_defaults({}, chosen) == OURS | chosen


def test_model_without_defaults_uses_default_sampling():
    assert used(model()) == NEUTRAL | OURS
    assert used(model(temperature=0.6)) == NEUTRAL | {"temperature": 0.6}


def test_unset_sampling_params_have_model_or_neutral_values():
    assert used(model(), SamplingParams()) == NEUTRAL
    assert used(model(), SamplingParams(top_p=0.5)) == NEUTRAL | {"top_p": 0.5}
    assert used(model(top_k=20), SamplingParams(top_p=0.5)) == NEUTRAL | {"top_p": 0.5, "top_k": 20}


def test_given_values_are_used_exactly():
    defaults = sampling_defaults({})
    assert used(model(), SamplingParams(), defaults) == NEUTRAL | OURS
    sent = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    assert used(model(), SamplingParams(**sent), defaults) == NEUTRAL
    assert used(model(), SamplingParams(temperature=0), defaults)["temperature"] == 0.0


def test_a_default_chain():
    params = SamplingParams().with_defaults({"samplers": ["top_k", "temperature"]})
    assert params.samplers == ("top_k", "temperature")
    assert SamplingParams(samplers=[]).with_defaults({"samplers": ["top_k"]}).samplers == ()


def test_parameters_reach_the_sampler():
    engine = make_engine()
    engine.submit([1, 2])
    engine.step()
    numbers = adapter_of(engine).last_sampling.numbers
    assert {name: round(float(values[0]), 6) for name, values in numbers.items()} == OURS


def test_generation_config_selects_the_defaults(tmp_path):
    def defaults(setting):
        with LLM("mock", generation_config=setting) as llm:
            return llm.default_sampling

    assert defaults("auto") == OURS
    assert defaults("none") == defaults("vllm") == NEUTRAL
    with naming(ModelLoadError, "generation_config.json"):
        defaults(str(tmp_path))
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.3, "top_k": 9, "eos_token_id": 2}')
    assert defaults(str(tmp_path)) == {"temperature": 0.3, "top_k": 9}
    file.write_text('{"temperature": -1}')
    with naming(ModelLoadError, "temperature"):
        defaults(str(tmp_path))
    options = build_parser().parse_args(["serve", "mock", "--generation-config", "vllm"])
    assert config_from_args(options).engine.generation_config == "vllm"


def test_serve_accepts_them_as_flags():
    flags = ["--temperature", "0.5", "--top-k", "7", "--repetition-penalty", "1.2", "--typical-p",
             "0.9", "--samplers", "top_k;temperature", "--seed", "4"]  # fmt: skip
    config = config_from_args(build_parser().parse_args(["serve", *flags]))
    assert config.sampling == {
        "temperature": 0.5, "top_k": 7, "repetition_penalty": 1.2, "typical_p": 0.9,
        "samplers": ("top_k", "temperature"),
    }  # fmt: skip
    assert config.engine.seed == 4
    with invalid_input("temperature"):
        ServerConfig(sampling={"temperature": 101})
