"""Ollama's model objects."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import math
import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llaisys.server.service import Service

FOREVER = "2318-01-01T00:00:00Z"  # Ollama's expires_at of a model that is never unloaded
MAX_HEADER_BYTES = 64 << 20  # of a safetensors file
QUANTIZATION = re.compile(r"(?i)(iq|q)[0-9](_[a-z0-9]+)*|bf16|f16|f32")  # in the name of a file
WEIGHTS = ("*.safetensors", "*.gguf")


def weight_bytes(path: str) -> int:
    """Return the size of the model's weight files; 0 without files."""
    root = Path(path)
    files = [root] if root.is_file() else [f for kind in WEIGHTS for f in root.glob(kind)]
    return sum(file.stat().st_size for file in files if file.is_file())


@functools.lru_cache(64)
def weight_types(path: str) -> tuple[int, str]:
    """Return (number of parameters, quantization name) of a model's files; 0 and "" where the files
    do not show them."""
    root = Path(path)
    if root.is_file():
        found = QUANTIZATION.search(root.name)
        return 0, "" if found is None else found[0].upper()
    counts: Counter[str] = Counter()
    for file in root.glob("*.safetensors"):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size)) if size <= MAX_HEADER_BYTES else {}
        for name, tensor in header.items():
            if name != "__metadata__":
                counts[tensor["dtype"]] += math.prod(tensor["shape"])
    return counts.total(), counts.most_common(1)[0][0] if counts else ""


def parameter_size(count: int) -> str:
    """Return a number of parameters as Ollama writes it: 596.0M, 7.6B."""
    for unit, text in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{text}"
    return str(count) if count else ""


def details(service: Service, name: str) -> dict[str, Any]:
    """Return the details object; empty fields before the first load."""
    info = service.known_info
    path, kind = ("", "") if info is None else (info.model_path, info.model_type)
    count, quantization = weight_types(path) if path else (0, "")
    return {
        "parent_model": service.parent_of(name) or "",
        "format": "gguf" if path.endswith(".gguf") else "safetensors",
        "family": kind,
        "families": [kind] if kind else [],
        "parameter_size": parameter_size(count),
        "quantization_level": quantization,
    }


async def model_entry(service: Service, name: str) -> dict[str, Any]:
    """Return the entry of /api/tags. `digest` is a hash of the name: clients use it as an id."""
    info = service.known_info
    return {
        "name": name,
        "model": name,
        "modified_at": stamp(service.created),
        "size": 0 if info is None else await asyncio.to_thread(weight_bytes, info.model_path),
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": await asyncio.to_thread(details, service, name),
    }


async def running_entry(service: Service, name: str) -> dict[str, Any]:
    entry = await model_entry(service, name)
    del entry["modified_at"]
    return {
        **entry,
        "expires_at": FOREVER,
        "size_vram": 0 if service.info.device == "cpu" else entry["size"],
        "context_length": service.info.max_model_len,
    }


async def model_details(service: Service, name: str) -> dict[str, Any]:
    info, kind = service.info, service.info.model_type
    described = await asyncio.to_thread(details, service, name)
    defaults = service.engine.inputs.defaults
    numbers = (f"{key:<30} {value}" for key, value in defaults.items() if value is not None)
    return {
        "modelfile": "",
        "parameters": "\n".join(numbers),
        "template": getattr(service.engine.tokenizer, "chat_template", None) or "",
        "license": "",
        "details": described,
        "model_info": {
            "general.architecture": kind,
            "general.parameter_count": (await asyncio.to_thread(weight_types, info.model_path))[0],
            f"{kind}.context_length": info.max_model_len,
            f"{kind}.embedding_length": info.hidden_size,
            f"{kind}.vocab_size": info.vocab_size,
        },
        "capabilities": capabilities(service),
        "modified_at": stamp(service.created),
    }


def capabilities(service: Service) -> list[str]:
    """Every model supports tools; thinking depends on the template's markers."""
    thinks = service.engine.style.markers is not None
    return ["completion", "tools", *(["thinking"] if thinks else [])]


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
