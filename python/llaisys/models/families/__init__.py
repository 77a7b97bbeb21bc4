"""Registry of model families, by `model_type`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from llaisys.common.model_registry import register_model
from llaisys.models.families.cohere import COHERE, COHERE2
from llaisys.models.families.cwm import CWM
from llaisys.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, KIMI_K2
from llaisys.models.families.dots1 import DOTS1
from llaisys.models.families.encoder import BERT, ROBERTA, XLM_ROBERTA
from llaisys.models.families.ernie4_5 import ERNIE4_5
from llaisys.models.families.ernie4_5_moe import ERNIE4_5_MOE
from llaisys.models.families.exaone4 import EXAONE4
from llaisys.models.families.exaone_moe import EXAONE_MOE
from llaisys.models.families.gemma import GEMMA, GEMMA2, GEMMA3, VAULTGEMMA
from llaisys.models.families.glm4 import GLM, GLM4
from llaisys.models.families.glm4_moe import GLM4_MOE
from llaisys.models.families.gpt_oss import GPT_OSS
from llaisys.models.families.granite import GRANITE
from llaisys.models.families.granite_moe import GRANITE_MOE
from llaisys.models.families.helium import HELIUM
from llaisys.models.families.llama import LLAMA
from llaisys.models.families.mimo import MIMO
from llaisys.models.families.minimax_m2 import MINIMAX_M2
from llaisys.models.families.mistral import MINISTRAL, MISTRAL
from llaisys.models.families.mixtral import MIXTRAL
from llaisys.models.families.olmo2 import OLMO2
from llaisys.models.families.olmo3 import OLMO3
from llaisys.models.families.olmoe import OLMOE
from llaisys.models.families.phi3 import PHI3
from llaisys.models.families.qwen2 import QWEN2
from llaisys.models.families.qwen3 import QWEN3
from llaisys.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from llaisys.models.families.seed_oss import SEED_OSS
from llaisys.models.families.smollm3 import SMOLLM3
from llaisys.models.families.solar_open import SOLAR_OPEN
from llaisys.models.families.stablelm import STABLELM
from llaisys.models.families.starcoder2 import STARCODER2
from llaisys.models.loading import json_config
from llaisys.models.loading.checkpoint import Checkpoint
from llaisys.models.loading.family import CheckpointConfig, Family, UnknownFamilyError
from llaisys.models.loading.resolve import open_files

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(QWEN2, LLAMA, QWEN3, MISTRAL, MIMO, PHI3, SMOLLM3, GRANITE, OLMO2, GLM, GLM4),
        *(GEMMA, GEMMA2, GEMMA3, COHERE, COHERE2, STARCODER2, STABLELM),
        *(QWEN3_MOE, QWEN2_MOE, MIXTRAL, OLMOE, GRANITE_MOE, GLM4_MOE, GPT_OSS),
        *(EXAONE4, ERNIE4_5, SEED_OSS, HELIUM, OLMO3, MINISTRAL, VAULTGEMMA, CWM),
        *(DOTS1, SOLAR_OPEN, MINIMAX_M2, EXAONE_MOE, ERNIE4_5_MOE),
        *(BERT, ROBERTA, XLM_ROBERTA),
        *(DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2, GLM4_MOE_LITE),
    )
}


PLUGINS = "llaisys.families"  # entry points of installed packages: functions without arguments
_loaded_plugins: set[str] = set()


def register_family(family: Family, adapter: str = "llaisys.models.decoder:DecoderAdapter") -> None:
    """Public, for families outside this package: read models whose model_type is `family.name` with
    `family` and run them with `adapter`, "module:class". The name must be new."""
    register_model(family.name, adapter)
    FAMILIES[family.name] = family


def load_plugins() -> bool:
    """Call the entry points of PLUGINS that have not been called; False: there are none."""
    found = [point for point in entry_points(group=PLUGINS) if point.value not in _loaded_plugins]
    for point in found:
        _loaded_plugins.add(point.value)
        point.load()()
    return bool(found)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a model directory or a GGUF file. Plugins are loaded when its family is unknown."""
    try:
        return open_files(path, FAMILIES)
    except UnknownFamilyError:
        if not load_plugins():
            raise
    return open_files(path, FAMILIES)


def load_config(directory: Path) -> CheckpointConfig:
    """The config of a model directory, without reading weights; for tests and tools."""
    return json_config.read_config(directory, FAMILIES)[1]


def parse_config(
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    where: str = "config.json",
) -> CheckpointConfig:
    """The config from the contents of config.json and generation_config.json."""
    return json_config.parse_config(config, generation, where, FAMILIES)[1]


def file_tensors(config: CheckpointConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor of a Hugging Face directory, with the experts apart. Not for
    families with other fused tensors."""
    family = FAMILIES[config.model_type]
    for name, shape in family.tensors(config):
        source = family.source(name, config, False)
        for part in source.parts:
            yield part, (shape[0] // len(source.parts), *shape[1:])
        if not source.parts:
            yield source.name, shape


def expected_tensors(config: CheckpointConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(Hugging Face name, shape) of every tensor that the model needs, in forward order."""
    return FAMILIES[config.model_type].tensors(config)
