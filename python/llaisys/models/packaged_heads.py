"""Draft heads shipped with the package: one folder of heads/ per model file.

"drafts_for" in a head's config.json has the name and size in bytes of its model file. A false match
costs only acceptance rate.
"""

from __future__ import annotations

from pathlib import Path

from llaisys.tokenization.json_file import read_json_object

DIRECTORY = Path(__file__).parent / "heads"


def packaged_head(model: str) -> Path | None:
    """The folder of the draft head for this model file, or None."""
    file = Path(model)
    if not file.is_file():
        return None
    made_for = {"file": file.name, "bytes": file.stat().st_size}
    for config in sorted(DIRECTORY.glob("*/config.json")):
        if read_json_object(config).get("drafts_for") == made_for:
            return config.parent
    return None
