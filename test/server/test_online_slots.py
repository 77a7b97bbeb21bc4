"""/slots/N with save, restore and erase, and requests with `id_slot`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_helpers import error_of
from server_helpers import ServerProcess

PROMPT = "the capital of France is a city of light " * 2  # several blocks
FILE = {"filename": "slot 1.bin"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess("--slot-save-path", str(folder), "--max-num-seqs", "4") as process:
        yield process.wait_ready()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as found:
        yield found


def complete(client: httpx.Client, slot: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "n_predict": 4, "temperature": 0, "ignore_eos": True, "id_slot": slot}
    response = client.post("/completion", json={**body, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def change(client: httpx.Client, slot: int, action: str, **fields: Any) -> dict[str, Any]:
    response = client.post(f"/slots/{slot}", params={"action": action}, json={**FILE, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_saved_slot_is_restored_into_another(client: httpx.Client, folder: Path) -> None:
    first = complete(client, 1)
    total = first["timings"]["prompt_n"]
    assert first["timings"]["cache_n"] == 0 and first["id_slot"] == 1
    saved = change(client, 1, "save")
    assert saved["n_saved"] == total + 3 and saved["timings"]["save_ms"] >= 0
    assert saved["n_written"] == (folder / FILE["filename"]).stat().st_size
    assert complete(client, 1)["timings"]["cache_n"] > 0  # of the slot
    assert complete(client, 0)["timings"]["cache_n"] == 0  # slots share no cache
    restored = change(client, 2, "restore")
    assert restored["n_restored"] == saved["n_saved"] and restored["n_read"] == saved["n_written"]
    again = complete(client, 2)
    assert again["timings"]["cache_n"] > 0 and again["content"] == first["content"]


def test_erased_slot_computes_its_prompt_again(client: httpx.Client) -> None:
    total = complete(client, 3)["timings"]["prompt_n"]
    assert complete(client, 3)["timings"]["prompt_n"] < total
    response = client.post("/slots/3?action=erase")
    assert response.json() == {"id_slot": 3, "n_erased": total + 3}
    assert complete(client, 3)["timings"]["prompt_n"] == total
    assert complete(client, -1)["id_slot"] == -1


def test_files_of_plain_tokens_are_restored(client: httpx.Client, folder: Path) -> None:
    tokens = list(range(20, 60))
    head = struct.pack("=III", 0x67677371, 2, len(tokens))
    (folder / "plain.bin").write_bytes(head + struct.pack(f"={len(tokens)}I", *tokens))
    restored = change(client, 0, "restore", filename="plain.bin")
    assert restored["n_restored"] == len(tokens)
    assert complete(client, 0, prompt=[*tokens, 5])["timings"]["cache_n"] > 0


@pytest.mark.parametrize(
    "content",
    [
        b"", b"no", struct.pack("=III", 1, 2, 0), struct.pack("=III", 0x67677371, 2, 10**9),
        struct.pack("=IIII", 0x67677371, 2, 2, 5), struct.pack("=IIII", 0x67677371, 2, 1, 10**6),
    ],
)  # fmt: skip
def test_invalid_files_are_rejected(client: httpx.Client, folder: Path, content: bytes) -> None:
    (folder / "bad.bin").write_bytes(content)
    response = client.post("/slots/0?action=restore", json={"filename": "bad.bin"})
    assert error_of(response, 400)["code"] == "invalid_slot_file"


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "/etc/passwd", "x\0", "x" * 201])
def test_names_stay_in_the_folder(client: httpx.Client, name: str) -> None:
    response = client.post("/slots/0?action=save", json={"filename": name})
    assert error_of(response, 400)["param"] == "filename"


def test_errors_name_their_field(client: httpx.Client) -> None:
    missing = client.post("/slots/0?action=restore", json={"filename": "missing"})
    assert error_of(missing, 400)["param"] == "filename"
    assert error_of(client.post("/slots/0?action=shake", json=FILE), 400)["param"] == "action"
    assert error_of(client.post("/slots/4?action=erase"), 400)["param"] == "id_slot"
    response = client.post("/completion", json={"prompt": "a", "id_slot": 4})
    assert error_of(response, 400)["param"] == "id_slot"


def test_keys_have_their_own_files(tmp_path: Path) -> None:
    options = ("--slot-save-path", str(tmp_path), "--api-key", "key-a", "--api-key", "key-b")
    with ServerProcess(*options) as server:
        server.wait_ready()
        with server.client(key="key-a") as first, server.client(key="key-b") as second:
            complete(first, 0)
            assert change(first, 0, "save")["n_saved"] > 0
            response = second.post("/slots/0?action=restore", json=FILE)
            assert error_of(response, 400)["param"] == "filename"
