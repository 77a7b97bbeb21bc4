"""Check that a checkpoint has the tensors that its model needs."""

from __future__ import annotations

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.checkpoint import Checkpoint


def check_coverage(checkpoint: Checkpoint) -> list[str]:
    """Return the names of all tensors that the model needs; other tensors are ignored.

    Raises `ModelLoadError` naming the first missing, misshaped or unreadable tensor.
    """
    where = checkpoint.where
    present = set(checkpoint.names())
    names = []
    for name, shape in checkpoint.family.tensors(checkpoint.config):
        if name not in present:
            raise ModelLoadError(f"{where}: tensor {name!r} is missing")
        found = checkpoint.shape(name)
        if found != shape:
            raise ModelLoadError(
                f"{where}: tensor {name!r} has shape {list(found)}, the config requires "
                f"{list(shape)}"
            )
        checkpoint.record(name)  # raises for an element type that cannot be read
        names.append(name)
    return names
