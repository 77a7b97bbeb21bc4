"""Ollama's model objects."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llaisys.server.service import Service

FOREVER = "2318-01-01T00:00:00Z"  # Ollama's expires_at of a model that is never unloaded
WEIGHTS = ("*.safetensors", "*.gguf")


def weight_bytes(path: str) -> int:
    """Return the size of the model's weight files; 0 without files."""
    root = Path(path)
    files = [root] if root.is_file() else [f for kind in WEIGHTS for f in root.glob(kind)]
    return sum(file.stat().st_size for file in files if file.is_file())


def details(service: Service) -> dict[str, Any]:
    """Return the details object; empty fields before the first load."""
    info = service.known_info
    path, kind = ("", "") if info is None else (info.model_path, info.model_type)
    return {
        "parent_model": "",
        "format": "gguf" if path.endswith(".gguf") else "safetensors",
        "family": kind,
        "families": [kind] if kind else [],
        "parameter_size": "",
        "quantization_level": "",
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
        "details": details(service),
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


def model_details(service: Service) -> dict[str, Any]:
    info, kind = service.info, service.info.model_type
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "license": "",
        "details": details(service),
        "model_info": {
            "general.architecture": kind,
            f"{kind}.context_length": info.max_model_len,
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
