"""environment.md, from the variables that the sources read."""

from __future__ import annotations

import re
from pathlib import Path

from reference_pages.markdown import code, page, prose, table

ROOT = Path(__file__).resolve().parents[2]
READ = re.compile(
    r"""(?:os\.environ\.(?:get|setdefault)\(|os\.environ\[|getenv\(|os\.getenv\()\s*["'](\w+)["']"""
)
TEXTS = {
    "NO_COLOR": "Any value: no colours in `llaisys chat`",
    "TERM": "`dumb`: no colours in `llaisys chat`",
    "LLAISYS_API_KEY": "API keys of `llaisys serve`, separated by commas; key of `bench serve`",
    "LLAISYS_CACHE": "Directory of downloaded models and of remembered GPU kernels (default: "
    "`$XDG_CACHE_HOME/llaisys`)",
    "LLAISYS_CPU_AMX": "`off` disables the AMX kernels",
    "LLAISYS_CPU_ISA": "Instruction set of the CPU kernels: `portable`, `avx2`, `avx512`, `neon`",
    "LLAISYS_DEVICE": "Device of `--device auto`: `cpu` or `cuda` (default: CUDA where it works)",
    "LLAISYS_LIBRARY": "Path of the native library (default: the one in the package)",
    "LLAISYS_NVTX": "`1` marks the stages of a step for NVIDIA's profilers",
    "CUDA_VISIBLE_DEVICES": "GPUs that the process may use, as for every CUDA program",
    "HOME": "Home directory, base of the cache directory",
    "OLLAMA_MODELS": "Where Ollama keeps its models (default: `~/.ollama/models`)",
    "OPENBLAS_NUM_THREADS": "Set to 1 by the command line unless it is set",
    "PYTHONPATH": "Handed to child processes with absolute entries only",
    "XDG_CACHE_HOME": "Base of the cache directory (default: `~/.cache`)",
    "XDG_STATE_HOME": "Base of the session file (default: `~/.local/state`)",
}


def variables() -> dict[str, set[str]]:
    """Variable -> the files that read it."""
    found: dict[str, set[str]] = {}
    for folder, ends in (("python/llaisys", (".py",)), ("src", (".cpp", ".hpp", ".cu", ".cuh"))):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in ends:
                for name in READ.findall(path.read_text()):
                    found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


def environment_page() -> str:
    read = variables()
    if read.keys() != TEXTS.keys():
        raise ValueError(
            f"variables without a description or a reader: {sorted(read.keys() ^ TEXTS.keys())}"
        )
    own = [name for name in TEXTS if name.startswith("LLAISYS_")]
    rows = [(code(n), TEXTS[n], ", ".join(map(code, sorted(read[n])))) for n in [*own, *TEXTS]]
    return page(
        "Environment variables",
        prose("Options are flags, keywords or keys of a file; these variables are the exceptions."),
        table(["Variable", "Meaning", "Read by"], list(dict.fromkeys(rows))),
    )
