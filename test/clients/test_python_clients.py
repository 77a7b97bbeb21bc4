"""Packages that people use, unchanged, against a real server: each chats, streams, and uses its
tools and its JSON where it has them.

They live in an environment of their own (`build/clients`, made by `make test` from the extra
`clients`): they pin versions of each other's dependencies that the rest of the tests does not have.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from script import KEY
from scripted_server import scripted_server
from server_helpers import ROOT, ServerProcess

RUNNER = Path(__file__).resolve().parent / "programs" / "runner.py"
PYTHON = ROOT / "build" / "clients" / "bin" / "python"

CLIENTS = {
    "openai_chat": ["chat", "stream", "tools", "reasoning", "structured", "vectors"],
    "openai_responses": ["chat", "stream", "tools", "reasoning", "structured"],
    "anthropic_client": ["chat", "stream", "tools", "reasoning"],
    "ollama_client": ["chat", "stream", "tools", "reasoning", "structured", "vectors"],
    "litellm_client": ["chat", "stream", "tools", "structured", "vectors"],
    "langchain_client": ["chat", "stream", "tools", "structured", "forced", "vectors"],
    "instructor_client": ["structured", "forced", "parallel", "responses", "messages"],
    "llama_index_client": ["chat", "stream", "tools", "forced"],
    "pydantic_ai_client": ["chat", "stream", "tools", "structured", "forced"],
    "openai_agents_client": ["chat", "stream", "tools", "structured"],
    "llm_client": ["chat", "stream", "tools", "structured"],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    if not PYTHON.exists():
        pytest.skip("needs build/clients: run `make test`, or `make clients`")
    with scripted_server(tmp_path_factory.mktemp("clients"), "--api-key", KEY) as process:
        yield process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def statuses(request: pytest.FixtureRequest, server: ServerProcess, folder: Path) -> dict[str, int]:
    """Exit statuses of the clients that were chosen."""
    tests = [item for item in request.session.items if item.path == request.path]
    chosen = {name: CLIENTS[name] for name in (test.callspec.params["name"] for test in tests)}
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "test" / "helpers"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing is fetched
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LANGSMITH_TRACING": "false",
    }
    command = [str(PYTHON), str(RUNNER), server.url, str(folder), json.dumps(chosen)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CLIENTS)
def test_client(statuses: dict[str, int], folder: Path, name: str) -> None:
    assert statuses[name] == 0, (folder / f"{name}.txt").read_text()[-8000:]
