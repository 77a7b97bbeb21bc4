"""Whether a checkpoint has the tensors that its model needs."""

from __future__ import annotations

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.checkpoint import Checkpoint


def check_coverage(checkpoint: Checkpoint) -> list[str]:
    """The names of all tensors that the model needs, once it is sure that they are there.

    Raises `ModelLoadError` naming the first missing, misshaped or unreadable tensor.
    Tensors that the model does not need are left alone.
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
                f"{where}: tensor {name!r} has shape {list(found)}, the config asks for "
                f"{list(shape)}"
            )
        checkpoint.record(name)  # raises for an element type that cannot be read
        names.append(name)
    return names
