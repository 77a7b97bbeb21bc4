"""Adapters over HTTP: model names of every protocol, loading and unloading, keys and paths."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from error_helpers import invalid_input
from lora_files import Lora
from model_files import tiny_config, write_hf_model
from server_helpers import ServerProcess

from llaisys.common.lora import LoraModule
from llaisys.server.engine_client.lora_table import LoraTable

CONFIG = tiny_config("qwen2")
KEYS = [
    {"key": "admin-key", "name": "ops", "admin": True},
    {"key": "user-key", "name": "user"},
]
PROMPT = "hello"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_hf_model(folder / "base", CONFIG, seed=3)
    for number in range(4):
        Lora(CONFIG, 4, seed=number, strength=2.0).write_peft(folder / "adapters" / f"a{number}")
    broken = Lora(CONFIG, 2).write_peft(folder / "adapters" / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"\0" * 40)
    Lora(CONFIG, 2, seed=8).write_peft(folder / "outside")
    (folder / "adapters" / "link").symlink_to(folder / "outside")
    (folder / "keys").write_text("\n".join(map(json.dumps, KEYS)))
    return folder


def arguments(folder: Path, *more: str) -> tuple[str, ...]:
    modules = [
        f"a0={folder}/adapters/a0",
        json.dumps({"name": "a1", "path": f"{folder}/adapters/a1"}),
    ]
    return (
        *("--model", f"{folder}/base", "--served-model-name", "base"),
        *("--lora-modules", *modules, "--max-loras", "2", "--max-cpu-loras", "3"),
        *("--kv-cache-memory-bytes", "8MiB", "--max-model-len", "256", "--threads", "1"),
        *("--allowed-lora-path", f"{folder}/adapters"),
        *more,
    )


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    keys = ("--api-key-file", f"{folder}/keys")
    with ServerProcess(*arguments(folder, *keys), real=True) as process:
        yield process.wait_ready()


@pytest.fixture
def admin(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client("admin-key") as client:
        yield client
        for card in client.get("/v1/models").json()["data"]:
            if card["id"] not in ("base", "a0", "a1"):
                client.post("/v1/unload_lora_adapter", json={"lora_name": card["id"]})


def complete(client: httpx.Client, model: str, **more: Any) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}
    response = client.post("/v1/completions", json={**body, "ignore_eos": True})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    text: str = response.json()["choices"][0]["text"]
    return text


def load(client: httpx.Client, name: str, path: str, **more: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **more})


def test_models_lists_adapters_with_their_parent(admin: httpx.Client) -> None:
    cards = {card["id"]: card for card in admin.get("/v1/models").json()["data"]}
    assert list(cards) == ["base", "a0", "a1"]
    assert cards["base"]["parent"] is None
    assert cards["a0"]["parent"] == "base" and cards["a0"]["root"] == "a0"
    assert admin.get("/v1/models/a1").json()["id"] == "a1"
    tags = admin.get("/api/tags").json()["models"]
    assert [tag["name"] for tag in tags] == ["base", "a0", "a1"]
    assert tags[1]["details"]["parent_model"] == "base"


def test_every_protocol_takes_an_adapter_as_model(admin: httpx.Client) -> None:
    found = {}
    for model in ("base", "a0", "a1"):
        chat = {"messages": [{"role": "user", "content": "hi"}], "model": model}
        openai = admin.post(
            "/v1/chat/completions", json={**chat, "max_tokens": 12, "temperature": 0}
        ).json()
        anthropic = admin.post(
            "/v1/messages", json={**chat, "max_tokens": 12, "temperature": 0}
        ).json()
        responses = admin.post(
            "/v1/responses",
            json={"model": model, "input": "hi", "max_output_tokens": 12, "temperature": 0},
        ).json()
        ollama = admin.post(
            "/api/chat",
            json={**chat, "stream": False, "options": {"num_predict": 12, "temperature": 0}},
        ).json()
        assert openai["model"] == anthropic["model"] == responses["model"] == model
        assert ollama["model"] == model
        text = openai["choices"][0]["message"]["content"]
        assert ollama["message"]["content"] == text
        assert anthropic["content"][0]["text"] == text
        found[model] = (text, complete(admin, model))
    assert len({texts[1] for texts in found.values()}) == 3


def test_llama_cpp_lora_field_and_default(admin: httpx.Client) -> None:
    base, first, second = (complete(admin, name) for name in ("base", "a0", "a1"))
    assert complete(admin, "base", lora="a1") == second
    assert complete(admin, "base", lora=[{"id": 0, "scale": 1.0}, {"id": 1, "scale": 0}]) == first
    assert complete(admin, "base", lora=[]) == base

    def llama(**more: Any) -> str:
        body = {"prompt": PROMPT, "n_predict": 12, "temperature": 0, "ignore_eos": True, **more}
        text: str = admin.post("/completion", json=body).json()["content"]
        return text

    listed = admin.get("/lora-adapters").json()
    assert [(item["id"], item["path"], item["scale"]) for item in listed] == [
        (0, "a0", 0.0),
        (1, "a1", 0.0),
    ]
    assert llama() == base and llama(lora=[{"id": 1, "scale": 1}]) == second
    assert admin.post("/lora-adapters", json=[{"id": 0, "scale": 1}]).status_code == 200
    assert llama() == first and complete(admin, "base") == base
    assert admin.get("/lora-adapters").json()[0]["scale"] == 1.0
    assert admin.post("/lora-adapters", json=[]).status_code == 200
    assert llama() == base


@pytest.mark.parametrize(
    ("lora", "status", "named"),
    [
        ("other", 404, "no LoRA adapter"),
        ([{"id": 7, "scale": 1}], 400, "lora[].id"),
        ([{"id": 0, "scale": 0.5}], 400, "lora[].scale"),
        ([{"id": 0, "scale": 1}, {"id": 1, "scale": 1}], 400, "one adapter"),
        ([{"id": -1, "scale": 1}], 400, "id"),
    ],
)
def test_wrong_lora_fields(admin: httpx.Client, lora: Any, status: int, named: str) -> None:
    body = {"model": "base", "prompt": "x", "max_tokens": 1, "lora": lora}
    response = admin.post("/v1/completions", json=body)
    assert response.status_code == status and named in response.json()["error"]["message"]
    body = {"model": "a1", "prompt": "x", "max_tokens": 1, "lora": "a0"}
    assert admin.post("/v1/completions", json=body).status_code == 400


def test_load_use_and_unload(admin: httpx.Client, server: ServerProcess) -> None:
    before = server.metric("lora_reads_total", "admin-key")
    response = load(admin, "new", "a2")
    assert response.status_code == 200 and "added" in response.text
    text = complete(admin, "new")
    assert text != complete(admin, "base")
    assert [card["id"] for card in admin.get("/v1/models").json()["data"]][-1] == "new"
    assert load(admin, "new", "a3").json()["error"]["code"] == "lora_already_loaded"
    assert load(admin, "new", "a3", load_inplace=True).status_code == 200
    assert complete(admin, "new") != text
    server.wait_for(lambda: server.metric("lora_reads_total", "admin-key") >= before + 2, "reads")
    response = admin.post("/v1/unload_lora_adapter", json={"lora_name": "new"})
    assert response.status_code == 200 and "removed" in response.text
    body = {"model": "new", "prompt": "x", "max_tokens": 1}
    assert admin.post("/v1/completions", json=body).status_code == 404
    again = admin.post("/v1/unload_lora_adapter", json={"lora_name": "new"})
    assert again.status_code == 404


@pytest.mark.parametrize(
    ("name", "path", "named"),
    [
        ("x", "broken", "adapter_model.safetensors"),
        ("x", "absent", "--allowed-lora-path"),
        ("x", "../outside", "--allowed-lora-path"),
        ("x", "link", "--allowed-lora-path"),
        ("x", "/etc/passwd", "--allowed-lora-path"),
        ("x", "", "lora_path"),
        ("x", ".", "--allowed-lora-path"),
        ("x", "https://example.com/a", "--allowed-lora-path"),
        ("x" * 300, "a2", "characters"),
        ("a b", "a2", "lora_name"),
        ("base", "a2", "a model has that name"),
        ("a0", "a2", "already loaded"),
    ],
)
def test_refused_loads(admin: httpx.Client, folder: Path, name: str, path: str, named: str) -> None:
    response = load(admin, name, path)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert named in message and str(folder) not in message
    assert [card["id"] for card in admin.get("/v1/models").json()["data"]] == ["base", "a0", "a1"]


def test_only_admin_keys_change_adapters(server: ServerProcess) -> None:
    with server.client("user-key") as user:
        complete(user, "a0")
        assert user.get("/lora-adapters").status_code == 200
        for path, body in (
            ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "a2"}),
            ("/v1/unload_lora_adapter", {"lora_name": "a0"}),
            ("/lora-adapters", [{"id": 0, "scale": 1}]),
        ):
            response = user.post(path, json=body)
            assert response.status_code == 403
            assert response.json()["error"]["code"] == "not_admin"
        complete(user, "a0")


def test_unload_while_requests_run(admin: httpx.Client, server: ServerProcess) -> None:
    assert load(admin, "new", "a2").status_code == 200
    expected = complete(admin, "new", max_tokens=200)

    def lines() -> None:
        body = {"model": "new", "prompt": PROMPT, "max_tokens": 200, "temperature": 0}
        with (
            server.client("admin-key") as client,
            client.stream(
                "POST", "/v1/completions", json={**body, "ignore_eos": True, "stream": True}
            ) as stream,
        ):
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    started.set()
                    texts.append(json.loads(line[6:])["choices"][0]["text"])

    started, texts = threading.Event(), list[str]()
    thread = threading.Thread(target=lines)
    thread.start()
    assert started.wait(30)
    assert admin.post("/v1/unload_lora_adapter", json={"lora_name": "new"}).status_code == 200
    body = {"model": "new", "prompt": "x", "max_tokens": 1}
    assert admin.post("/v1/completions", json=body).status_code == 404
    thread.join(60)
    assert "".join(texts) == expected


def test_adapters_share_no_prefix(admin: httpx.Client) -> None:
    prompt = list(range(10, 110))

    def cached(model: str) -> int:
        body = {"model": model, "prompt": prompt, "max_tokens": 1}
        usage = admin.post("/v1/completions", json=body).json()["usage"]
        number: int = usage["prompt_tokens_details"]["cached_tokens"]
        return number

    assert [cached(m) for m in ("base", "a0", "a1", "a0", "base")] == [0, 0, 0, 96, 96]


def test_run_time_changes_need_an_allowed_path(folder: Path) -> None:
    given = [a for a in arguments(folder) if a not in ("--allowed-lora-path", f"{folder}/adapters")]
    with ServerProcess(*given, real=True) as process, process.wait_ready().client() as client:
        response = load(client, "x", f"{folder}/adapters/a2")
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "lora_updates_off"
        complete(client, "a0")


def test_replicas_load_adapters_together(folder: Path) -> None:
    more = ("--data-parallel-size", "2")
    with (
        ServerProcess(*arguments(folder, *more), real=True) as process,
        process.wait_ready().client() as client,
    ):
        assert load(client, "new", "a2").status_code == 200
        assert load(client, "bad", "broken").status_code == 400
        texts = {complete(client, "new", cache_salt=str(i)) for i in range(6)}
        assert len(texts) == 1 and texts != {complete(client, "base")}
        unload = client.post("/v1/unload_lora_adapter", json={"lora_name": "new"})
        assert unload.status_code == 200


def test_several_models_have_their_own_adapters(folder: Path, tmp_path: Path) -> None:
    write_hf_model(tmp_path / "other", CONFIG, seed=11)
    size = 'kv_cache_memory_bytes = "8MiB"\nmax_num_batched_tokens = 512\nmax_model_len = 256\n'
    adapters = folder / "adapters"
    file = tmp_path / "models.toml"
    file.write_text(
        f'[models.one]\nmodel = "{folder}/base"\n{size}lora_modules = ["x={adapters}/a0"]\n'
        f'[models.two]\nmodel = "{tmp_path}/other"\n{size}enable_lora = true\n'
    )
    more = ("--models", str(file), "--allowed-lora-path", str(adapters), "--threads", "1")
    with ServerProcess(*more, real=True) as process, process.wait_ready().client() as client:
        assert complete(client, "x") != complete(client, "one")
        assert load(client, "y", "a1", base_model_name="two").status_code == 200
        assert complete(client, "y") != complete(client, "two")
        cards = {c["id"]: c["parent"] for c in client.get("/v1/models").json()["data"]}
        assert cards == {"one": None, "x": "one", "two": None, "y": "two"}
        assert load(client, "x", "a1", base_model_name="two").status_code == 400


def test_number_of_adapters_is_limited_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llaisys.server.engine_client.lora_table.MAX_MODULES", 2)
    table = LoraTable([LoraModule("a", "/a")])
    table.begin_load("b", in_place=False)
    with invalid_input("lora_name"):
        table.begin_load("c", in_place=False)
    table.end_load("b", "/b")
    table.begin_load("b", in_place=True)  # a replacement
