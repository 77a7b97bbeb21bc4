"""LoRA adapters: PEFT directories and GGUF files, checked against a base model and read into native
tensors."""

from pathlib import Path

from llaisys.common.errors import LlaisysError, ModelLoadError
from llaisys.models.families.model_config import ModelConfig
from llaisys.models.loading.resolve import resolve_model
from llaisys.models.lora.files import MAX_RANK, LoraFiles, base_linears
from llaisys.models.lora.gguf import open_gguf
from llaisys.models.lora.peft import open_peft
from llaisys.models.lora.reading import read_lora
from llaisys.models.lora.weights import LoraWeights
from llaisys.tokenization.json_file import resolve_inside

__all__ = ["MAX_RANK", "LoraFiles", "LoraWeights", "open_lora", "read_lora"]


def open_lora(spec: str, config: ModelConfig) -> LoraFiles:
    """Read the headers of an adapter and check it against the base model. Raises ModelLoadError."""
    try:
        path = Path(resolve_model(spec, progress=False))
        if path.is_dir():
            ggufs = sorted(path.glob("*.gguf"))
            if (path / "adapter_config.json").is_file() or len(ggufs) != 1:
                return open_peft(path, base_linears(config))
            path = resolve_inside(ggufs[0])
        return open_gguf(path, config)
    except ModelLoadError:
        raise
    except (OSError, LlaisysError) as error:
        raise ModelLoadError(f"{spec}: {error}") from error
