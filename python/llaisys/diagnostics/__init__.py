"""`llaisys pull`, `models`, `rm` and `env`: models of this machine, environment report."""

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from llaisys.common.errors import LlaisysError
from llaisys.common.machine_limits import describe_cores, describe_memory
from llaisys.common.numa import format_cpus, numa_nodes
from llaisys.common.version import __version__


def fetch_model(model: str | None, revision: str | None = None) -> str:
    """Download a model (None: the default model) and return its path."""
    from llaisys.models.loading.resolve import DEFAULT_MODEL, resolve_model

    return str(resolve_model(model or DEFAULT_MODEL, revision=revision))


def list_models() -> tuple[list[dict[str, Any]], list[str]]:
    """The models of this machine as plain data, and the short names that can be downloaded."""
    from llaisys.models.loading.known_models import known_names
    from llaisys.models.loading.local_models import local_models

    found = [
        {"name": m.name, "cache": m.cache, "bytes": m.num_bytes, "path": str(m.path)}
        for m in local_models()
    ]
    return found, known_names()


def delete_model(name: str) -> str:
    """Delete a downloaded model; return where it was."""
    from llaisys.models.loading.local_models import remove_model

    return str(remove_model(name).path)


def chat_history_path() -> Path:
    """The file of the lines typed in `llaisys chat`."""
    from llaisys.models.loading.local_models import cache_directory

    return cache_directory() / "chat_history"


def describe_environment() -> dict[str, str]:
    """Versions, machine and library, for bug reports."""
    facts = {
        "llaisys": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": describe_cores(),
        "memory": describe_memory(),
        "numa": "; ".join(f"node {n.number}: {format_cpus(n.cpus)}" for n in numa_nodes()),
    }
    try:
        from llaisys.libllaisys.handles import describe_devices
        from llaisys.libllaisys.library import last_error, lib, library_path
        from llaisys.models.device import choose_device, requested_device

        choice = choose_device()  # loads the CUDA library if that is possible
        requested = requested_device("auto")
        facts["device auto"] = f"{choice.device}: {choice.reason}"
        if requested != "auto":
            facts["device auto"] = f"{requested}: set by LLAISYS_DEVICE"
        native = lib()
        facts["library"] = f"{library_path().name}, ABI {native.llaisysAbiVersion()}"
        isa = native.llaisysCpuIsa().decode()
        facts["cpu kernels"] = isa or f"none: {last_error()}"
        for number, line in enumerate(describe_devices("cuda")):
            facts[f"gpu {number}"] = line
    except LlaisysError as error:
        facts["library"] = f"not loaded: {error}"
    for package in ("numpy", "tokenizers", "jinja2", "gguf", "huggingface_hub"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts
