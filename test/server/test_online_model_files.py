"""Truncating, overwriting or deleting the files of a served model does not change its answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import model_files
import pytest
from server_helpers import ServerProcess


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    """Overwrite in place, as `cp` does."""
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)


def write_model(directory: Path, kind: str) -> None:
    if kind == "gguf":
        model_files.write_gguf(directory / "m.gguf", kind="Q8_0")
    else:
        model_files.write_hf_model(directory, model_files.tiny_config())


def answers(client: httpx.Client) -> list[Any]:
    """Text, a chat with the template, logprobs, tokens: everything that might read a file."""
    text = {"prompt": "ab ba", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 8, "temperature": 0}
    found = []
    for path, body in [
        ("/v1/completions", {**text, "logprobs": 3, "n": 3}),
        ("/v1/chat/completions", chat),
    ]:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["choices"])
    tokens = client.post("/tokenize", json={"prompt": "ab ba 😀", "return_token_strs": True})
    return [*found, tokens.json()]


@pytest.mark.parametrize("change", [truncate, overwrite, Path.unlink])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_changed_model_files_do_not_affect_a_loaded_model(
    tmp_path: Path, kind: str, change: Callable[[Path], None]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder, kind)
    options = (str(folder), "--num-kv-blocks", "64", "--max-model-len", "64")
    with ServerProcess(*options, real=True, session_file=tmp_path / "s.db") as server:
        engine = server.wait_ready().engine_pid
        with server.client() as client:
            before = answers(client)
            for path in folder.iterdir():
                change(path)
            assert answers(client) == before
            assert client.get("/health").status_code == 200
        assert server.engine_pid == engine
        for pid in (engine, server.process.pid):
            assert str(folder) not in Path(f"/proc/{pid}/maps").read_text()
        assert server.stop() == 0
