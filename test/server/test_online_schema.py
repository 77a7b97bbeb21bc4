"""schemathesis on /openapi.json: valid and deliberately invalid data.

Uses its strategies with one server for all routes, not its pytest plugin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from nightly import NIGHTLY
from server_helpers import ServerProcess

EXAMPLES = 25 if NIGHTLY else 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(  # strict: what the document does not have is refused
        "--strict-fields",
        "--max-num-seqs",
        "16",
        "--max-model-len",  # bounds answers without max_tokens
        "256",
        session_file=tmp_path_factory.mktemp("schema") / "s.db",
    ) as process:
        yield process.wait_ready()


@pytest.fixture(scope="module")
def operations(server: ServerProcess) -> dict[str, Any]:
    import schemathesis  # a second of CPU time: not in every worker

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    return {operation.label: operation for operation in found}


def check(case: Any) -> Any:
    """Any data: no 500, and errors have the API's format."""
    for name in ("max_tokens", "max_output_tokens"):  # bounds the work, not the types
        given = case.body.get(name) if isinstance(case.body, dict) else None
        if type(given) is int and (given == -1 or 4 < given <= 1 << 31):
            case.body[name] = 4
    response = case.call(timeout=60)
    if response.status_code == 504:  # a valid limit that nothing can keep
        assert "timeout" in case.body, (case.body, response.text)
        return response
    assert response.status_code < 500, (response.status_code, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]  # Ollama: a string
        assert message and "Traceback" not in message
    return response


def run_cases(operation: Any, negative: bool) -> None:
    from schemathesis import GenerationMode

    mode = GenerationMode.NEGATIVE if negative else GenerationMode.POSITIVE

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        response = check(case)
        if negative and operation.body:
            assert response.status_code >= 400, (case.body, response.text)

    run()


ROUTES = {
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /tokenize",
    "POST /detokenize",
    "POST /completion",
    "POST /apply-template",
    "POST /infill",
    "POST /embedding",
    "POST /chat/completions",
    "GET /props",
    "GET /slots",
    "GET /models",
    "GET /tokenizer_info",
    "POST /v1/requests/{request_id}/cancel",
    "POST /v1/sessions",
    "GET /v1/sessions/{session_id}",
    "PATCH /v1/sessions/{session_id}",
    "DELETE /v1/sessions/{session_id}",
    "GET /v1/models/{model}",
    "POST /v1/responses",
    "GET /v1/responses/{response_id}",
    "DELETE /v1/responses/{response_id}",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /api/chat",
    "POST /api/generate",
    "POST /api/show",
    "POST /api/embed",
    "POST /api/embeddings",
    "POST /v1/embeddings",
    "POST /v1/score",
    "POST /v1/rerank",
}
WITH_BODY = sorted(route for route in ROUTES if route.startswith(("POST", "PATCH")))


@pytest.mark.parametrize("route", sorted(ROUTES))
def test_valid_data(operations: dict[str, Any], route: str) -> None:
    assert set(operations) >= ROUTES
    run_cases(operations[route], negative=False)


@pytest.mark.parametrize("route", [r for r in WITH_BODY if "cancel" not in r])
def test_invalid_data_is_rejected(operations: dict[str, Any], route: str) -> None:
    run_cases(operations[route], negative=True)


def test_server_is_alive_afterwards(server: ServerProcess) -> None:
    with server.client() as client:
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    server.wait_idle()


def test_every_request_schema_forbids_extra_fields(server: ServerProcess) -> None:
    """No request object of ours swallows a field that it does not know."""
    with server.client() as client:
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
    ours = [s for n, s in schemas.items() if n.endswith(("Request", "Patch", "Message", "Part"))]
    assert len(ours) >= 8
    assert all(schema["additionalProperties"] is False for schema in ours)
