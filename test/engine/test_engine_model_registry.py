"""The engine reaches models through the registry alone."""

from __future__ import annotations

import pytest
from error_helpers import naming

from llaisys import LLM, SamplingParams
from llaisys.common import model_registry
from llaisys.common.errors import InvalidInputError

PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, detokenize=False)


def test_the_mock_model_runs_through_the_whole_engine() -> None:
    with LLM(model_type="mock", max_model_len=256) as llm:
        first, second = llm.generate([[1, 2, 3], [4, 5]], PARAMS)
        assert len(first.token_ids) == len(second.token_ids) == 5
        assert llm.generate([[4, 5]], PARAMS)[0].token_ids == second.token_ids


def test_a_registered_model_type_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = dict(model_registry.MODEL_REGISTRY)
    monkeypatch.setattr(model_registry, "MODEL_REGISTRY", registry)
    model_registry.register_model("other-mock", "llaisys.models.mock:MockAdapter")
    assert model_registry.get_adapter_class("other-mock").__name__ == "MockAdapter"


def test_unknown_model_type_is_rejected_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fetch(model: str) -> None:
        raise AssertionError("fetched before the type was checked")

    monkeypatch.setattr("llaisys.models.loading.resolve.resolve_model", fetch)
    with naming(InvalidInputError, "gpt-7"):
        LLM(model_type="gpt-7")
