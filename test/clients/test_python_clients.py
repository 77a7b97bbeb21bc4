"""Packages that people use, unchanged, against a real server: each chats, streams, and uses its
tools and its JSON where it has them.

They live in an environment of their own (`build/clients`, made by `make test` from the extra
`clients`): they pin versions of each other's dependencies that the rest of the tests does not have.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from script import KEY
from scripted_server import scripted_server
from server_helpers import ROOT, ServerProcess

PROGRAMS = Path(__file__).resolve().parent / "programs"
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
def runs(
    request: pytest.FixtureRequest, server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """Those that were chosen, two at a time: most of their seconds are imports."""
    tests = [item for item in request.session.items if item.path == request.path]
    chosen = [test.callspec.params["name"] for test in tests]
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(run, name, server, tmp_path_factory.mktemp(name)) for name in chosen
        }


def run(name: str, server: ServerProcess, home: Path) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "test" / "helpers"),
        "HOME": str(home),  # no user settings
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing is fetched
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LANGSMITH_TRACING": "false",
    }
    command = [str(PYTHON), str(PROGRAMS / f"{name}.py"), server.url, *CLIENTS[name]]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("name", CLIENTS)
def test_client(runs: dict[str, Future[subprocess.CompletedProcess[str]]], name: str) -> None:
    done = runs[name].result()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
