"""model_families.md, from the registry of families and the loaders."""

from __future__ import annotations

import sys

from llaisys.common.model_registry import MODEL_REGISTRY
from llaisys.engine.config import QUANTIZATIONS
from llaisys.models.draft_head_files import _PREFIXES as HEADS
from llaisys.models.families import FAMILIES
from llaisys.models.loading.convert import STORAGE
from llaisys.models.loading.family import Family
from llaisys.models.loading.gguf_file import UNREADABLE
from llaisys.models.loading.gguf_reader import GGML_TYPES
from llaisys.models.loading.quantization import METHODS
from reference_pages.markdown import code, one_line, page, prose, table


def _documentation(family: Family) -> str:
    """First paragraph of the module that defines the family: that of its name, or the one that has
    it under another name."""
    own = sys.modules.get(f"llaisys.models.families.{family.name}")
    if own is not None:
        return str(own.__doc__).partition("\n\n")[0]
    for name, module in sys.modules.items():
        is_family = name.startswith("llaisys.models.families.") and module.__doc__
        if is_family and any(value is family for value in vars(module).values()):
            return str(module.__doc__).partition("\n\n")[0]
    raise LookupError(family.name)


def families_page() -> str:
    rows = []
    for name, family in FAMILIES.items():
        text = one_line(_documentation(family))
        has_gguf = getattr(family, "has_gguf_files", True)
        gguf = code(family.architecture()) if has_gguf else "no"
        rows.append((code(name), gguf, MODEL_REGISTRY[name].rpartition(":")[2], text))
    types = [type_name for type_name, _, _ in GGML_TYPES.values() if type_name not in UNREADABLE]
    return page(
        "Model families",
        prose(
            "A model directory is opened by `model_type` of its config.json, a GGUF file by "
            "`general.architecture`. Guide: [models.md](../guides/models.md)."
        ),
        table(["`model_type`", "GGUF architecture", "Adapter", "Models"], rows),
        "## Weight formats",
        table(
            ["Format", "Types"],
            [
                ("safetensors", ", ".join(map(code, STORAGE))),
                ("safetensors, `quantization_config`", ", ".join(map(code, METHODS))),
                ("GGUF", ", ".join(map(code, types))),
                ("at load (`--quantization`)", ", ".join(map(code, QUANTIZATIONS))),
            ],
        ),
        "## Draft heads",
        prose(
            "`speculative_config` accepts heads in the published layouts "
            + ", ".join(map(code, HEADS))
            + "; guide: [speculative_decoding.md](../guides/speculative_decoding.md)."
        ),
    )
