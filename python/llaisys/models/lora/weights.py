"""`LoraWeights`: an adapter in host memory, as native tensors."""

from dataclasses import dataclass

from llaisys.common.closing import Closing
from llaisys.libllaisys.handles import Tensor


@dataclass(frozen=True, slots=True)
class LoraTensors:
    """A [rank, inputs] and B [outputs, rank] of one linear layer."""

    field: str
    layer: int
    a: Tensor
    b: Tensor
    scale: float


class LoraWeights(Closing):
    """Owner of the tensors; `close` frees them."""

    def __init__(self) -> None:
        self.tensors: list[LoraTensors] = []

    def close(self) -> None:
        tensors, self.tensors = self.tensors, []
        for entry in tensors:
            entry.a.close()
            entry.b.close()
