"""guidance and Open WebUI, unchanged, against a real server with a scripted model.

`make test-agents` installs each into an environment of its own in build/agents; without them the
tests are skipped and say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from script import ASK_COUNT, COUNT, HELLO, KEY, MODEL
from scripted_server import scripted_server
from server_helpers import ROOT, ServerProcess, wait_for

FOLDER = ROOT / "build" / "agents"
PROGRAMS = Path(__file__).resolve().parent / "programs"
START_SECONDS = 600  # Open WebUI imports torch and creates its database


def installed(name: str, program: str) -> str:
    path = FOLDER / name / "bin" / program
    if not path.exists():
        pytest.skip(f"needs {name} in build/agents: run `make test-agents`")
    return str(path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with scripted_server(tmp_path_factory.mktemp("server"), "--api-key", KEY) as process:
        yield process


@pytest.mark.parametrize("scenario", ["chat", "choices", "regex", "stop", "structured"])
def test_guidance(server: ServerProcess, scenario: str) -> None:
    command = [installed("guidance", "python"), PROGRAMS / "guidance_client.py", server.url]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "test" / "helpers")}
    done = subprocess.run(
        [*command, scenario], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@contextlib.contextmanager
def open_webui(server: ServerProcess, folder: Path) -> Iterator[str]:
    """Open WebUI with the server as its only connection: its address."""
    settings = {
        "DATA_DIR": str(folder),
        "WEBUI_SECRET_KEY": "secret",
        "OPENAI_API_BASE_URL": f"{server.url}/v1",
        "OPENAI_API_KEY": KEY,
        "ENABLE_OLLAMA_API": "false",
        # Neither a download nor a local embedding model.
        "OFFLINE_MODE": "true",
        "RAG_EMBEDDING_ENGINE": "openai",
        "BYPASS_EMBEDDING_AND_RETRIEVAL": "true",
        "ANONYMIZED_TELEMETRY": "false",
    }
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [installed("open-webui", "open-webui"), "serve", "--host", "127.0.0.1"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), **settings},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()[-6000:]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/health").is_success
        return False

    try:
        wait_for(is_ready, "Open WebUI", START_SECONDS)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def streamed_text(client: httpx.Client, question: str) -> str:
    """The answer to a chat through Open WebUI, put together from its stream."""
    messages = [{"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "stream": True}
    pieces = []
    with client.stream("POST", "/api/chat/completions", json=body) as response:
        assert response.is_success, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: ")).get("choices", [])
                pieces += [choice["delta"].get("content") or "" for choice in choices]
    assert len(pieces) > 2  # a stream, not one piece
    return "".join(pieces)


def test_open_webui(server: ServerProcess, tmp_path: Path) -> None:
    """Sign up, list the models, chat."""
    account = {"name": "A", "email": "a@example.com", "password": "correct horse 1"}
    with (
        open_webui(server, tmp_path) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        signed = client.post("/api/v1/auths/signup", json=account)
        assert signed.is_success, signed.text
        client.headers["Authorization"] = f"Bearer {signed.json()['token']}"
        models = client.get("/api/models").json()["data"]
        assert MODEL in [model["id"] for model in models]
        assert streamed_text(client, "Hi") == HELLO
        assert streamed_text(client, ASK_COUNT) == COUNT
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": False}
        whole = client.post("/api/chat/completions", json=body).json()
        assert whole["choices"][0]["message"]["content"] == HELLO
