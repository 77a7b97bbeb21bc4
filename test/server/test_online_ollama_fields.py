"""Ollama: pull of a served model, sizes in /api/show, context, logprobs. Model objects with
Anthropic's names, and OpenAI's error format for routes that do not exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from http_helpers import KEYS, error_of
from model_files import write_gguf
from server_helpers import ServerProcess

from llaisys.server.ollama.models import parameter_size

MODEL = "fake"
OPTIONS = {"num_predict": 5, "temperature": 0}


def generate(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "prompt": "hi", "options": OPTIONS, **fields}
    response = client.post("/api/generate", json=body)
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def test_pull_of_a_served_model(client: httpx.Client) -> None:
    for name in (MODEL, f"{MODEL}:latest"):
        lines = client.post("/api/pull", json={"model": name}).text.splitlines()
        assert json.loads(lines[-1]) == {"status": "success"} and len(lines) > 1
    body = {"name": MODEL, "stream": False}
    assert client.post("/api/pull", json=body).json() == {"status": "success"}
    assert client.post("/api/pull", json={"model": "other"}).status_code == 404
    assert client.post("/api/pull", json={}).status_code == 400


def test_show_has_sizes(client: httpx.Client) -> None:
    found = client.post("/api/show", json={"model": MODEL}).json()
    kind = found["model_info"]["general.architecture"]
    assert {f"{kind}.context_length", f"{kind}.embedding_length"} <= found["model_info"].keys()
    assert "general.parameter_count" in found["model_info"]
    assert {"parameter_size", "quantization_level"} <= found["details"].keys()


def test_parameter_sizes_as_ollama_writes_them() -> None:
    counts = (0, 12, 3005, 596_049_920, 596_000_000, 7_615_616_512, 8_000_000_000)
    sizes = ["", "12", "3K", "596.05M", "596M", "7.6B", "8B"]
    assert [parameter_size(count) for count in counts] == sizes


def test_sizes_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    extra = {"general.file_type": 15, "general.license": "mit", "llama.odd": float("nan")}
    weights = write_gguf(path, metadata=extra)
    with ServerProcess(str(path), real=True) as process, process.wait_ready().client() as client:
        tag, running = (client.get(f"/api/{k}").json()["models"][0] for k in ("tags", "ps"))
        shown = client.post("/api/show", json={"model": tag["name"]}).json()
    count = sum(values.size for values in weights.values())
    info = shown["model_info"]
    assert info["general.parameter_count"] == count
    assert (info["llama.block_count"], info["llama.attention.head_count_kv"]) == (2, 2)
    assert info["tokenizer.ggml.tokens"] is None and info["llama.odd"] is None  # as JSON can say
    assert "tokenizer.chat_template" not in info and shown["license"] == "mit"
    for details in (tag["details"], running["details"], shown["details"]):
        assert details["parameter_size"] == parameter_size(count)
        assert details["quantization_level"] == "Q4_K_M"
        assert (details["context_length"], details["embedding_length"]) == (512, 64)
    assert tag["size"] == running["size"] == path.stat().st_size
    assert tag["capabilities"] == shown["capabilities"] == ["completion", "tools"]


def test_context_continues_an_answer(client: httpx.Client) -> None:
    first = generate(client)[-1]
    assert first["done"] is True and len(first["context"]) == first["prompt_eval_count"] + 5
    second = generate(client, prompt="more", context=first["context"], stream=False)[0]
    alone = generate(client, prompt="more", stream=False)[0]
    assert second["prompt_eval_count"] == len(first["context"]) + alone["prompt_eval_count"]
    assert second["context"][: len(first["context"])] == first["context"]
    assert "context" not in generate(client, raw=True)[-1]


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_logprobs(client: httpx.Client, path: str) -> None:
    body = {"model": MODEL, "prompt": "hi", "options": OPTIONS, "logprobs": True}
    if path == "/api/chat":
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    whole = client.post(path, json={**body, "stream": False, "top_logprobs": 2}).json()
    assert len(whole["logprobs"]) == whole["eval_count"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole["logprobs"])
    lines = [json.loads(line) for line in client.post(path, json=body).text.splitlines()]
    sent = [entry["token"] for line in lines for entry in line.get("logprobs", ())]
    assert sent == [entry["token"] for entry in whole["logprobs"]]


def test_model_objects_have_anthropic_names(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    card = listed["data"][0]
    assert card["type"] == "model" and card["display_name"] == card["id"]
    assert card["created_at"].endswith("+00:00")
    ids = [entry["id"] for entry in listed["data"]]
    pages = (listed["first_id"], listed["last_id"], listed["has_more"])
    assert pages == (ids[0], ids[-1], False)


def test_files_are_a_404_of_openai(server: ServerProcess, client: httpx.Client) -> None:
    response = client.post("/v1/files", files={"file": b"x"}, data={"purpose": "batch"})
    error_of(response, 404)
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0) as sdk,
        pytest.raises(openai.NotFoundError),
    ):
        sdk.files.create(file=b"x", purpose="batch")
