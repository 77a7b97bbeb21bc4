"""The pooling that a sentence-transformers model declares in modules.json and the config of its
Pooling module."""

import json
from pathlib import Path
from typing import Any

from llaisys.common.errors import ModelLoadError
from llaisys.tokenization.json_file import read_bytes, read_optional_json_object

_FOLDER = "1_Pooling"
_KNOWN = ("Transformer", "Pooling", "Normalize")  # modules that the engine applies
# Key of the Pooling config -> our name.
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


def declared_pooling(directory: Path) -> str | None:
    """'cls', 'mean' or 'last'; None: the directory declares none. ModelLoadError for another
    pooling or another module."""
    folder = _FOLDER
    for module in _modules(directory / "modules.json"):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _KNOWN:
            raise _unsupported(directory / "modules.json", f"module {kind!r}", _KNOWN)
        if kind == "Pooling":
            folder = str(module.get("path", _FOLDER))
    if not folder or "/" in folder or "\\" in folder or folder.startswith("."):
        raise _unsupported(directory / "modules.json", f"path {folder[:80]!r}", (_FOLDER,))
    path = directory / folder / "config.json"
    config = read_optional_json_object(path)
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    if not chosen:
        return None
    if len(chosen) > 1 or chosen[0] not in _MODES:
        raise _unsupported(path, " + ".join(chosen), tuple(_MODES))
    return _MODES[chosen[0]]


def _modules(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    try:
        found = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(found, list) or not all(isinstance(module, dict) for module in found):
        raise ModelLoadError(f"{path}: expected a JSON list of objects")
    return found


def _unsupported(path: Path, what: str, known: tuple[str, ...]) -> ModelLoadError:
    return ModelLoadError(
        f"{path}: {what} is not supported; known: {', '.join(known)}. The option pooling replaces "
        "the declared pooling"
    )
