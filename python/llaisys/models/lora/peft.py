"""PEFT directories: adapter_config.json and adapter_model.safetensors.

The tensors say which modules are adapted. A list of target modules is compared with them; a regular
expression is not evaluated, because the file is untrusted.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llaisys.common.errors import ModelLoadError
from llaisys.models.loading.fields import Fields
from llaisys.models.loading.safetensors_dir import USABLE, read_header
from llaisys.models.lora.files import (
    MAX_RANK,
    BaseLinear,
    LoraFiles,
    LoraMatrix,
    by_source,
    pair_matrices,
)
from llaisys.tokenization.json_file import read_json_object, resolve_inside

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_ALPHA = 1e6
PREFIX = "base_model.model."
_TENSOR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_PATTERN = re.compile(r"\^?(?:\.\*\\?\.)?((?:\w|\\?\.)+)\$?")  # a module name or its end

# Settings that change the forward pass in ways that are not supported, if they are set.
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "modules_to_save": "modules_to_save (whole modules in the adapter)",
    "fan_in_fan_out": "fan_in_fan_out (transposed weights)",
    "lora_bias": "lora_bias (a bias in B)",
    "layer_replication": "layer_replication",
    "trainable_token_indices": "trainable_token_indices",
    "target_parameters": "target_parameters",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "use_qalora": "QALoRA",
}
# Initialisations that also change the weights of the base model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


def open_peft(directory: Path, linears: Mapping[str, BaseLinear]) -> LoraFiles:
    """Read the config and the header of the tensors. Raises ModelLoadError."""
    where, path = str(directory), directory / CONFIG_NAME
    if not path.is_file():
        raise ModelLoadError(f"{where}: {CONFIG_NAME} is missing; this is no PEFT adapter")
    fields = Fields(read_json_object(path), str(path))
    _check_kind(fields)
    matrices = _matrices(directory)
    rank = fields.integer("r", 1, MAX_RANK)
    alpha = fields.number("lora_alpha", -MAX_ALPHA, MAX_ALPHA, float(rank))
    ranks = _patterns(fields, "rank_pattern")
    alphas = _patterns(fields, "alpha_pattern")
    is_rslora = fields.boolean("use_rslora", False)

    def scale_of(module: str, found: int) -> float:
        expected = _value_for(module, ranks, rank)
        if found != expected:
            raise ModelLoadError(
                f"{where}: lora_A of {module!r} has rank {found}; {CONFIG_NAME} says {expected:g}"
            )
        numerator = float(_value_for(module, alphas, alpha))
        return numerator / (math.sqrt(found) if is_rslora else found)

    files = pair_matrices(where, matrices, linears, scale_of)
    _check_targets(fields, {module for module, _ in matrices}, by_source(linears.values()))
    return files


def _check_kind(fields: Fields) -> None:
    """Reject what is not a plain LoRA, by name."""
    fields.choice("peft_type", ("LORA",))
    fields.choice("task_type", ("CAUSAL_LM", "FEATURE_EXTRACTION"), "CAUSAL_LM")
    bias = fields.string("bias", "none")
    if bias != "none":
        raise fields.fail("bias", f"is {bias[:40]!r}; adapters with biases are not supported")
    for key, name in _UNSUPPORTED.items():
        if fields.values.get(key):
            raise fields.fail(key, f"is set; {name} is not supported")
    start = fields.values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise fields.fail(
            "init_lora_weights",
            f"is {start[:40]!r}, which changes the base weights; convert the adapter with PEFT's "
            "path_initial_model_for_weight_conversion first",
        )


def _matrices(directory: Path) -> dict[tuple[str, str], LoraMatrix]:
    path = directory / WEIGHTS_NAME
    if not path.is_file():
        pickle = directory / "adapter_model.bin"
        why = f" ({pickle.name} is a pickle and is never loaded)" if pickle.is_file() else ""
        raise ModelLoadError(f"{directory}: {WEIGHTS_NAME} is missing{why}")
    path = resolve_inside(path)
    found: dict[tuple[str, str], LoraMatrix] = {}
    for name, record in read_header(path).items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            kind = "DoRA is" if "lora_magnitude_vector" in name else "only lora_A and lora_B are"
            not_ = "not " if kind.startswith("DoRA") else ""
            raise ModelLoadError(f"{path}: tensor {name!r}: {kind} {not_}supported")
        if record.dtype not in USABLE.values():
            raise ModelLoadError(
                f"{path}: tensor {name!r} has element type {record.dtype}; usable: "
                f"{', '.join(USABLE)}"
            )
        key = match[1].removeprefix(PREFIX), match[2]
        if key in found:
            raise ModelLoadError(f"{path}: lora_{key[1]} of {key[0]!r} is there twice")
        found[key] = LoraMatrix(name, record.shape, record.dtype, record.read)
    return found


def _patterns(fields: Fields, key: str) -> dict[str, float]:
    """rank_pattern or alpha_pattern: values by the end of a module name."""
    section, found = fields.section(key), {}
    for pattern in section.values:
        match = _PATTERN.fullmatch(pattern)
        if match is None:
            raise fields.fail(
                key, f"has the key {pattern[:80]!r}; only module names, whole or their ends, are "
                "supported",
            )  # fmt: skip
        found[match[1].replace("\\.", ".")] = section.number(pattern, -MAX_ALPHA, MAX_ALPHA)
    return found


def _value_for(module: str, patterns: Mapping[str, float], default: float) -> float:
    return next((v for end, v in patterns.items() if _ends_with(module, end)), default)


def _ends_with(module: str, end: str) -> bool:
    return module == end or module.endswith(f".{end}")


def _check_targets(
    fields: Fields, adapted: set[str], modules: Mapping[str, list[BaseLinear]]
) -> None:
    """Every target must have tensors; `layers_to_transform` selects layers of them."""
    targets: Any = fields.values.get("target_modules")
    if targets is None or fields.has("exclude_modules") or fields.has("layers_pattern"):
        return
    if targets == "all-linear":
        targets = sorted({module.rsplit(".", 1)[1] for module in modules})
    if isinstance(targets, str):
        return  # a regular expression
    if not isinstance(targets, list) or not all(isinstance(item, str) for item in targets):
        raise fields.fail("target_modules", "is neither text nor a list of texts")
    layers: Any = fields.values.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    for target in targets:
        names = [module for module in modules if _ends_with(module, target)]
        if not names:
            raise fields.fail(
                "target_modules",
                f"names {target[:80]!r}, which is not one of the linear layers of the base model "
                "that adapters may change",
            )
        for module in names:
            is_target = layers is None or modules[module][0].layer in layers
            if is_target and module not in adapted:
                raise fields.fail("target_modules", f"names {target!r}; {module!r} has no tensors")
