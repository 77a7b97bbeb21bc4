"""The layer rules of the project: allowed imports. `check_layers.py` enforces them."""

from __future__ import annotations

# ---- Python: paths below python/llaisys, without .py ---------------------------------------------
# A module belongs to the row with the longest matching path. A layer may use itself and the listed
# entries; an entry covers everything below it, and `-entry` excludes a part of it.

PY_LAYERS: dict[str, list[str]] = {
    # layer                   may use
    "entrypoints":            ["bench", "diagnostics", "engine", "server", "chat",
                               "tokenization", "common",
                               "-engine/worker"],
    "diagnostics":            ["models", "libllaisys", "common"],
    "diagnostics/check_model": ["models", "libllaisys", "common"],
    "bench":                  ["entrypoints/llm", "engine", "models", "libllaisys",
                               "tokenization", "common"],
    "server":                 [],  # a module that SERVER_LEVELS does not name
    "chat":                   ["common"],
    "engine":                 ["engine", "tokenization", "common", "-engine/worker"],
    "engine/core":            ["engine", "common", "-engine/worker"],
    "engine/admission":       ["engine/scheduler", "engine/structured", "common"],
    "engine/llm_engine":      ["engine", "common", "-engine/worker"],
    "engine/input_processor":  ["engine/config", "tokenization", "common"],
    "engine/output_processor": ["engine/config", "engine/stop_strings", "tokenization", "common"],
    "engine/stop_strings":    [],
    "engine/config":          ["common"],
    "engine/engine_flags":    ["engine/config", "common"],
    "engine/wire":            ["processes", "common"],
    "engine/scheduler":       ["engine/batch_builder", "engine/request_queues",
                               "engine/block_manager", "engine/scheduled_batch",
                               "engine/context_window", "engine/config", "common"],
    "engine/batch_builder":   ["engine/request_queues", "engine/prefix_nodes",
                               "engine/scheduled_batch", "engine/step_time",
                               "engine/context_window", "engine/config", "common"],
    "engine/request_queues":  ["engine/block_manager", "engine/fair_queue", "engine/lora_slots",
                               "common"],
    "engine/lora_slots":      ["common"],
    "engine/lora_registry":   ["engine/config", "common"],
    "engine/context_window":  ["common"],
    "engine/prefix_nodes":    [],
    "engine/scheduled_batch": ["common"],
    "engine/step_time":       [],
    "engine/fair_queue":      ["common"],
    "engine/block_manager":   ["engine/prefix_nodes", "engine/host_blocks", "engine/config",
                               "common"],
    "engine/host_blocks":     ["engine/prefix_nodes", "common"],
    "engine/kv_transfer":     ["engine/block_manager", "engine/prefix_nodes", "engine/config",
                               "processes", "common"],
    "engine/structured":      ["tokenization", "common"],
    "processes":              ["common"],
    "engine/executor":        ["engine/worker", "engine/wire", "processes", "engine/config",
                               "models", "common"],
    "engine/worker":          ["engine/config", "models", "common"],
    "models":                 ["models", "libllaisys", "tokenization", "common"],
    "models/families":        ["models/loading", "common"],
    "models/loading":         ["tokenization", "common"],  # independent of families
    "tokenization":           ["common"],
    "common":                 [],
    "common/model_registry":  ["models/base", "common"],  # names adapters, imports none
    "libllaisys":             ["common/errors", "common/closing"],  # codes become exceptions there
    # The package's own files: `import llaisys`, `python -m llaisys`.
    "__init__":               ["entrypoints", "engine", "common", "libllaisys", "-engine/worker",
                               "models/families"],
    "__main__":               ["entrypoints", "server", "common", "libllaisys"],
}  # fmt: skip

# The server from the bottom up: a part (folder or module) uses itself and the levels below.
SERVER_LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors", "metrics", "tracing", "api_keys", "model_entries", "schemas"),
    ("config", "thread_pool"),
    ("http", "engine_client", "sessions", "options"),
    ("generation",),
    ("openai", "responses", "anthropic", "ollama", "llamacpp", "models"),
    ("app", "lifecycle"),
    ("http_server",),
    ("__main__", "route"),
)
MAX_SERVER_LEVELS = 8

_below = ["engine", "processes", "chat", "tokenization", "common", "-engine/worker"]
for _level in SERVER_LEVELS:
    _parts = [f"server/{part}" for part in _level]
    PY_LAYERS |= dict.fromkeys(_parts, _below)
    _below = [*_below, *_parts]

# External module -> the only layers that may import it; an empty list: none.
PY_EXTERNAL_ONLY: dict[str, list[str]] = {
    "ctypes": ["libllaisys"],
    "_ctypes": ["libllaisys"],
    "cffi": ["libllaisys"],
    "torch": ["diagnostics/check_model"],
    "transformers": ["diagnostics/check_model"],
}

# Layer -> external modules that it must not import.
PY_EXTERNAL_NEVER: dict[str, list[str]] = {
    "engine/scheduler": ["numpy"],
    "engine/batch_builder": ["numpy"],
    "engine/block_manager": ["numpy"],
}

# Model files and requests are untrusted: no module executes code that it reads.
PY_UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
PY_UNSAFE_CALLS = {"eval", "exec"}
PY_UNSAFE_ATTRIBUTES = {("torch", "load")}
PY_UNSAFE_NAMES = {"trust_remote_code", "allow_pickle"}  # `allow_pickle=False` is fine

# ---- C++: paths below src ------------------------------------------------------------------------
# As above; an entry may also be one header. `ops/*/op.hpp` is the interface of an operator: other
# operators use only that header. Every layer may include the public headers.

# From the bottom up: base < device < tensor < ops < {parallel, runtime/workspace, weights,
# kv_cache, output, graph} < models < runtime/runner < capi.
CPP_LAYERS: dict[str, list[str]] = {
    # layer                   may use
    "base":                   [],
    "device":                 ["base"],
    "tensor":                 ["device", "base"],
    "ops":                    ["tensor", "device", "base"],  # files shared by operators
    "ops/*":                  ["ops/*.hpp", "ops/*/op.hpp", "ops/cpu", "ops/cuda", "tensor",
                               "device", "base"],
    "parallel":               ["ops", "tensor", "device", "base"],
    "runtime/weights":        ["ops", "tensor", "device", "base"],
    "runtime/workspace":      ["tensor", "device", "base"],
    "runtime/kv_cache":       ["ops", "tensor", "device", "base"],
    "runtime/output":         ["ops", "tensor", "device", "base"],
    "runtime/graph":          ["runtime/workspace", "ops", "tensor", "device", "base"],
    "models":                 ["runtime/weights", "runtime/workspace", "parallel", "ops", "tensor",
                               "device", "base"],
    "runtime/runner":         ["models/model.hpp", "runtime", "parallel", "ops", "tensor", "device",
                               "base"],
    "capi":                   ["models", "runtime", "parallel", "ops", "tensor", "device", "base"],
}  # fmt: skip

# File pattern -> headers that it must not include: op.cpp of an operator checks its arguments and
# dispatches by device, and knows a device only by the kernels that its op.hpp declares.
CPP_NEVER: dict[str, list[str]] = {"ops/*/op.cpp": ["ops/cpu", "device/cpu"]}

CPP_FORBIDDEN_HEADERS = {"omp.h": "no OpenMP: threads come from device/cpu/thread_pool.hpp"}
