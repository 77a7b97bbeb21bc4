"""Coding agents, unchanged, against a real server: Codex CLI, Claude Code, aider and Open
Interpreter.

The scripted model solves one task with the agent's own tool, and the default model accepts the
first request. The packages take 2 GB, so `make test-agents` installs them into build/agents;
without them the tests are skipped and say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from script import KEY, MODEL
from scripted_server import scripted_server
from server_helpers import ROOT, ServerProcess

FOLDER = ROOT / "build" / "agents"
PROGRAMS = {
    "codex": FOLDER / "node" / "node_modules" / ".bin" / "codex",
    "claude": FOLDER / "node" / "node_modules" / ".bin" / "claude",
    "aider": FOLDER / "aider" / "bin" / "aider",
    "interpreter": FOLDER / "open-interpreter" / "bin" / "interpreter",
}
TASK = "Write the word kumquat into fruit.txt."
TEXT = "kumquat\n"
DONE = "The file is written."
# What the prompt contains when the tool has run; aider asks once, and writes the file itself.
AFTER_TOOL = {"interpreter": "are we done"}
TOOL_RESULT = "<tool_response>"


def tool_call(name: str, **arguments: str) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def answer(agent: str, file: Path) -> str:
    """What the model says to solve the task."""
    if agent == "codex":
        return tool_call("exec_command", cmd=f"echo {TEXT.strip()} > {file.name}")
    if agent == "claude":
        return tool_call("Write", file_path=str(file), content=TEXT)
    if agent == "interpreter":
        return f"```shell\necho {TEXT.strip()} > {file.name}\n```"
    return f"{file.name}\n```\n{TEXT}```\n"


def command(agent: str, url: str, *more: str) -> list[str]:
    if agent == "codex":
        provider = f'{{name="local", base_url="{url}/v1", wire_api="responses", env_key="KEY"}}'
        flags = [
            *("-c", "model_provider=local", "-c", f"model_providers.local={provider}"),
            *("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        ]
        return ["exec", *flags, "-m", MODEL, TASK]
    if agent == "claude":
        return ["-p", TASK, "--model", MODEL, "--allowedTools", "Write", *more]
    if agent == "interpreter":
        flags = ["--stdin", "--auto_run", "--disable_telemetry", "--offline"]
        return [*flags, "--model", MODEL, "--api_base", f"{url}/v1", "--api_key", KEY]
    return [
        *("--model", f"openai/{MODEL}", "--openai-api-base", f"{url}/v1", "--message", TASK),
        *("--edit-format", "whole", "--yes-always", "--no-git", "--no-show-model-warnings"),
        *("--no-check-update", "--analytics-disable", "--map-tokens", "0", "fruit.txt"),
    ]


def environment(home: Path, url: str) -> dict[str, str]:
    """Without the user's settings, and without requests to anything but the server."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "KEY": KEY,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "OPENAI_API_KEY": KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


@contextlib.contextmanager
def started(
    agent: str, server: ServerProcess, folder: Path, *more: str
) -> Iterator[subprocess.Popen[str]]:
    """The agent at work in `folder`/work; it and its children are killed at the end."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    process = subprocess.Popen(
        [str(PROGRAMS[agent]), *command(agent, server.url, *more)],
        cwd=work,
        env=environment(home, server.url),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(f"{TASK}\n" if agent == "interpreter" else "")
    process.stdin.close()
    process.stdin = None  # communicate() would flush it
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture(params=PROGRAMS)
def agent(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not PROGRAMS[name].exists():
        pytest.skip(f"needs {name} in build/agents: run `make test-agents`")
    return name


def test_agent_completes_a_task(agent: str, tmp_path: Path) -> None:
    file = tmp_path / "work" / "fruit.txt"
    rules = [
        {"when": [TASK, AFTER_TOOL.get(agent, TOOL_RESULT)], "say": DONE},
        {"when": [TASK], "say": answer(agent, file)},
    ]
    options = ("--api-key", KEY, "--num-kv-blocks", "10000")
    with (
        scripted_server(tmp_path, *options, rules=rules) as server,
        started(agent, server, tmp_path) as process,
    ):
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said[-6000:]
        assert file.read_text() == TEXT, said[-6000:]
        if agent != "aider":
            assert DONE in said


@pytest.fixture(scope="module")
def real_server() -> Iterator[ServerProcess]:
    options = ("--api-key", KEY, "--served-model-name", MODEL, "--kv-cache-memory-bytes", "1GiB")
    with ServerProcess(*options, real=True) as process:
        yield process.wait_ready()


def test_real_model_accepts_the_first_request(
    agent: str, tmp_path: Path, real_server: ServerProcess
) -> None:
    """Claude Code's 23 tools have 20,000 tokens; the default model has a context of 8192."""
    more = ("--tools", "Write") if agent == "claude" else ()
    before = real_server.metric("prompt_tokens_total", KEY)

    def is_in_engine() -> bool:
        running = real_server.metric("num_requests_running", KEY)
        return running > 0 or real_server.metric("prompt_tokens_total", KEY) > before

    with started(agent, real_server, tmp_path, *more):
        real_server.wait_for(is_in_engine, f"a request of {agent}", 120)
    real_server.wait_idle(KEY)
