"""model_families.md, from the registry of families and the loaders."""

from __future__ import annotations

from llaisys.common.model_registry import MODEL_REGISTRY
from llaisys.engine.config import QUANTIZATIONS
from llaisys.models.draft_head import _PREFIXES as HEADS
from llaisys.models.families import FAMILIES
from llaisys.models.loading.convert import STORAGE
from llaisys.models.loading.gguf_file import UNREADABLE
from llaisys.models.loading.gguf_reader import GGML_TYPES
from llaisys.models.loading.quantization import METHODS
from reference_pages.markdown import code, page, prose, table


def families_page() -> str:
    rows = []
    for name, family in FAMILIES.items():
        has_gguf = getattr(family, "has_gguf_files", True)
        gguf = code(family.architecture()) if has_gguf else "no"
        rows.append((code(name), gguf, MODEL_REGISTRY[name].rpartition(":")[2], family.about))
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
