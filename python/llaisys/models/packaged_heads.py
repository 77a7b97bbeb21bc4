"""Heads that come with the package: a folder of heads/ each, for one model file.

A head's config.json says which: "drafts_for" has the name and the bytes of the file. That is enough
to find it; a head for another model would only guess badly.
"""

from __future__ import annotations

from pathlib import Path

from llaisys.tokenization.json_file import read_json_object

DIRECTORY = Path(__file__).parent / "heads"


def packaged_head(model: str) -> Path | None:
    """The folder of the head for this model file; None: there is none."""
    file = Path(model)
    if not file.is_file():
        return None
    made_for = {"file": file.name, "bytes": file.stat().st_size}
    for config in sorted(DIRECTORY.glob("*/config.json")):
        if read_json_object(config).get("drafts_for") == made_for:
            return config.parent
    return None
