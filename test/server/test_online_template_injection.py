"""Attacks on chat templates over HTTP: client text is never template code, and a template that a
client makes expensive does not delay others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from http_helpers import error_of
from model_files import CHATML, CHATML_TOKENS, write_hf_model
from server_helpers import ServerProcess

CHAT = "/v1/chat/completions"
# A template with a loop whose length the client controls.
LOOPING = (
    "{% if n %}{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}{% endif %}"
)
INJECTIONS = [
    "{{ 7 * 7 }}",
    "{% for i in range(99999) %}x{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ raise_exception('pwned') }}",
    "{# comment #}{{ messages }}",
    "{%- set x = namespace() -%}",
    "${7*7} #{7*7} <%= 7*7 %> {{{{7*7}}}}",
    "{{ '%999999999d' % 1 }}",
    "%s %(x)s {0.__class__}",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("template")
    model = folder / "model"
    write_hf_model(model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = LOOPING + CHATML
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    options = (str(model), "--num-kv-blocks", "64")
    with ServerProcess(*options, real=True, session_file=folder / "s.db") as process:
        yield process.wait_ready()


def rendered(client: httpx.Client, messages: list[dict[str, str]], **fields: Any) -> str:
    """Return the prompt that the server renders."""
    answer = client.post("/tokenize", json={"messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    text = client.post("/detokenize", json={"tokens": answer.json()["tokens"]})
    return str(text.json()["prompt"])


@pytest.mark.parametrize("payload", INJECTIONS)
def test_client_text_is_never_template_code(client: httpx.Client, payload: str) -> None:
    begin, end = CHATML_TOKENS[1:]
    expected = f"{begin}user\n{payload}{end}\n{begin}assistant\n"
    messages = [{"role": "user", "content": payload}]
    assert rendered(client, messages, add_generation_prompt=True) == expected
    # As a template variable it is data too and cannot override the server's variables.
    variables = {
        "x": payload,
        "messages": [{"role": "system", "content": payload}],
        "self": payload,
    }
    kept = rendered(client, messages, add_generation_prompt=True, chat_template_kwargs=variables)
    assert kept == expected
    answer = client.post(CHAT, json={"messages": messages, "max_tokens": 2, "temperature": 0})
    assert answer.status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_templates_in_requests_are_rejected(client: httpx.Client, path: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    for value in INJECTIONS:
        error = error_of(
            client.post(path, json={"messages": messages, "chat_template": value}), 400
        )
        assert error["param"] == "chat_template"


def test_expensive_template_is_stopped_without_delaying_others(
    server: ServerProcess, client: httpx.Client
) -> None:
    """Completions and chats of others are served although each template runs 0.5 s."""
    plain = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    bomb = {**plain, "chat_template_kwargs": {"n": 99999}}

    def ignite() -> httpx.Response:
        with server.client() as own:
            return own.post(CHAT, json=bomb)

    with ThreadPoolExecutor(4) as pool:  # seconds of work, one after the other
        bombs = [pool.submit(ignite) for _ in range(4)]
        served = 0
        while not all(future.done() for future in bombs):
            assert client.get("/health").status_code == 200
            answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            assert answer.status_code == 200
            assert client.post(CHAT, json=plain).status_code == 200
            served += 1
    assert served > 2 * len(bombs)
    for future in bombs:
        message = error_of(future.result(), 400)["message"]
        assert "chat template" in message and "stopped" in message
