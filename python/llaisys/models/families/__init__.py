"""Registry of model families, by `model_type`."""

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from llaisys.common.model_registry import register_model
from llaisys.models.families import deepseek, encoder, gemma, glm, llama, olmo, other, qwen
from llaisys.models.loading import json_config
from llaisys.models.loading.checkpoint import Checkpoint
from llaisys.models.loading.family import CheckpointConfig, Family, UnknownFamilyError
from llaisys.models.loading.resolve import open_files

_MODULES = (qwen, llama, gemma, glm, olmo, other, deepseek, encoder)
# Every record of a family in these modules.
FAMILIES: dict[str, Family] = {
    value.name: value
    for module in _MODULES
    for value in vars(module).values()
    if isinstance(value, Family)
}

PLUGINS = "llaisys.families"  # entry points of installed packages: functions without arguments
loaded_plugins: set[str] = set()


def register_family(family: Family, adapter: str = "llaisys.models.decoder:DecoderAdapter") -> None:
    """Public, for families outside this package: read models whose model_type is `family.name` with
    `family` and run them with `adapter`, "module:class". The name must be new."""
    register_model(family.name, adapter)
    FAMILIES[family.name] = family


def load_plugins() -> bool:
    """Call the entry points of PLUGINS that have not been called; False: there are none."""
    found = [point for point in entry_points(group=PLUGINS) if point.value not in loaded_plugins]
    for point in found:
        loaded_plugins.add(point.value)
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
