"""The cache directory of downloaded models."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(cache_dir: str | Path | None = None) -> Path:
    """`cache_dir`, else $LLAISYS_CACHE, else llaisys/ in the user's cache directory."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    own = os.environ.get("LLAISYS_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llaisys"
