"""LoRA adapters: PEFT directories and GGUF files, checked against a base model and read into native
tensors."""

from llaisys.models.lora.files import MAX_RANK, LoraFiles
from llaisys.models.lora.opening import open_lora
from llaisys.models.lora.reading import read_lora
from llaisys.models.lora.weights import LoraWeights

__all__ = ["MAX_RANK", "LoraFiles", "LoraWeights", "open_lora", "read_lora"]
