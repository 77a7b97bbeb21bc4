"""Names of other programs: options and commands of llama.cpp, vLLM, SGLang and Ollama that have
another name here, or none. A refusal of an unknown name says so.
"""

from collections.abc import Iterable

from llaisys.common.validation import unknown_name

# Switches of `serve` elsewhere that name the only behaviour here: accepted there, with a warning.
WITHOUT_EFFECT = {
    "--enable-chunked-prefill": "prefill is always chunked",
    "--enable-auto-tool-choice": "tool calls are always parsed",
    "--jinja": "chat templates are always Jinja",
    "--cont-batching": "batching is always continuous",
    "-cb": "batching is always continuous",
    "--trust-remote-code": "code of a model is never run",
}

_ONE_DEVICE = "all layers of a model are on one device"
_NO_IMAGES = "images, audio and video are not supported"
_IN_MEMORY = "weights are read into memory"
_ONE_ATTENTION = "each device has one implementation of attention"
_EMBEDDINGS = "the model decides which endpoints there are"

# option -> (the option here or None, remark)
OPTIONS: dict[str, tuple[str | None, str]] = {
    # llama.cpp
    "-ngl": ("--device", _ONE_DEVICE),
    "--gpu-layers": ("--device", _ONE_DEVICE),
    "--n-gpu-layers": ("--device", _ONE_DEVICE),
    "-ctk": ("--kv-cache-dtype", "keys and values have one type"),
    "-ctv": ("--kv-cache-dtype", "keys and values have one type"),
    "--cache-type-k": ("--kv-cache-dtype", "keys and values have one type"),
    "--cache-type-v": ("--kv-cache-dtype", "keys and values have one type"),
    "-b": ("--max-num-batched-tokens", ""),
    "-ub": ("--max-num-batched-tokens", ""),
    "--batch-size": ("--max-num-batched-tokens", ""),
    "--ubatch-size": ("--max-num-batched-tokens", ""),
    "-cram": ("--kv-offload", ""),
    "--cache-ram": ("--kv-offload", ""),
    "-md": ("--speculative-config", "a JSON object with method and model"),
    "--model-draft": ("--speculative-config", "a JSON object with method and model"),
    "--draft-max": ("--speculative-config", "a JSON object with num_speculative_tokens"),
    "--spec-type": ("--speculative-config", "a JSON object with method"),
    "-sm": ("--tensor-parallel-size", ""),
    "--split-mode": ("--tensor-parallel-size", ""),
    "-ts": ("--tensor-parallel-size", "all devices get equal parts"),
    "--tensor-split": ("--tensor-parallel-size", "all devices get equal parts"),
    "-mg": ("--tensor-parallel-device-ids", ""),
    "--main-gpu": ("--tensor-parallel-device-ids", ""),
    "--lora": ("--lora-modules", "NAME=PATH, and NAME is the model of a request"),
    "-sys": ("--system", "of llaisys chat"),
    "--system-prompt": ("--system", "of llaisys chat"),
    "-s": ("--seed", ""),
    "-v": ("--log-level", ""),
    "--verbose": ("--log-level", "of llaisys serve"),
    "--models-dir": ("--models", "a TOML file with a table for each model"),
    "--ssl-key-file": ("--ssl-keyfile", ""),
    "--ssl-cert-file": ("--ssl-certfile", ""),
    "-hff": (None, "write MODEL as org/name:FILE"),
    "--hf-file": (None, "write MODEL as org/name:FILE"),
    "-hft": (None, "set the environment variable HF_TOKEN"),
    "--hf-token": (None, "set the environment variable HF_TOKEN"),
    "-mu": (None, "download the file and give its path as MODEL"),
    "--model-url": (None, "download the file and give its path as MODEL"),
    "-p": (None, "llaisys generate has the prompt as its last argument"),
    "--prompt": (None, "llaisys generate has the prompt as its last argument"),
    "-fa": (None, _ONE_ATTENTION),
    "--flash-attn": (None, _ONE_ATTENTION),
    "--mlock": (None, _IN_MEMORY),
    "--mmap": (None, _IN_MEMORY),
    "--no-mmap": (None, _IN_MEMORY),
    "--mmproj": (None, _NO_IMAGES),
    "--embedding": (None, _EMBEDDINGS),
    "--embeddings": (None, _EMBEDDINGS),
    "--rerank": (None, _EMBEDDINGS),
    "--reranking": (None, _EMBEDDINGS),
    # vLLM
    "--attention-backend": (None, _ONE_ATTENTION),
    "--convert": (None, _EMBEDDINGS),
    "--cpu-offload-gb": (None, _ONE_DEVICE),
    "--disable-log-requests": ("--log-level", ""),
    "--download-dir": (None, "set the environment variable HF_HOME or LLAISYS_CACHE"),
    "--enable-reasoning": ("--reasoning-parser", ""),
    "--enforce-eager": (None, "CUDA graphs have no option"),
    "--kv-transfer-config": ("--kv-transfer", ""),
    "--limit-mm-per-prompt": (None, _NO_IMAGES),
    "--load-format": (None, "the files of the model decide"),
    "--override-generation-config": ("--temperature", "and the other sampling defaults"),
    "--runner": (None, _EMBEDDINGS),
    "--speculative-model": ("--speculative-config", "a JSON object with method and model"),
    "--swap-space": ("--kv-offload", ""),
    "--task": (None, _EMBEDDINGS),
    "--tokenizer": (None, "the tokenizer of the model is used"),
    "--uvicorn-log-level": ("--log-level", ""),
    # SGLang
    "--chunked-prefill-size": ("--max-num-batched-tokens", ""),
    "--context-length": ("--max-model-len", ""),
    "--disable-radix-cache": ("--no-enable-prefix-caching", ""),
    "--dp-size": ("--data-parallel-size", ""),
    "--is-embedding": (None, _EMBEDDINGS),
    "--max-running-requests": ("--max-num-seqs", ""),
    "--mem-fraction-static": ("--gpu-memory-utilization", ""),
    "--model-path": ("--model", ""),
    "--tp-size": ("--tensor-parallel-size", ""),
    # Ollama
    "--keepalive": ("--keep-alive", ""),
    "--num-batch": ("--max-num-batched-tokens", ""),
    "--num-ctx": ("--max-model-len", ""),
    "--num-gpu": ("--device", _ONE_DEVICE),
    "--num-thread": ("--threads", ""),
}

# command -> (the command here or None, remark)
COMMANDS: dict[str, tuple[str | None, str]] = {
    # Ollama
    "cp": (None, "models are used where they are"),
    "create": (None, "a model is a directory or a GGUF file"),
    "help": (None, "llaisys --help, llaisys COMMAND --help"),
    "list": ("models", ""),
    "ls": ("models", ""),
    "ps": (None, "GET /api/ps of a server lists the loaded models"),
    "push": (None, "models are not published"),
    "run": ("chat", "llaisys generate MODEL PROMPT for a single answer"),
    "show": (None, "POST /api/show of a server describes a model"),
    "stop": (None, "a server ends on Ctrl-C or SIGTERM"),
    # others
    "cli": ("chat", ""),
    "collect-env": ("env", ""),
    "complete": ("generate", ""),
    "delete": ("rm", ""),
    "download": ("pull", ""),
    "perplexity": ("bench", "llaisys bench perplexity"),
    "remove": ("rm", ""),
    "run-batch": ("generate", "llaisys generate --file FILE.jsonl"),
    "server": ("serve", ""),
    "version": (None, "llaisys --version"),
}


def foreign_option(name: str) -> str | None:
    """The sentence about an option of another program; None: unknown. `name`: the flag, or the key
    of a file or keyword."""
    words = name.lstrip("-").replace("_", "-")
    dashes = name[: len(name) - len(name.lstrip("-"))] or "--"
    found = OPTIONS.get(dashes + words)
    if found is None and dashes + words in WITHOUT_EFFECT:
        found = (None, WITHOUT_EFFECT[dashes + words])
    return None if found is None else _sentence("option", name, *found)


def unknown_option(name: str, known: Iterable[str], what: str = "option") -> str:
    """Return "unknown option NAME", with its name here, or the nearest of the known ones."""
    return foreign_option(name) or unknown_name(what, name, known)


def unknown_command(name: str, known: Iterable[str]) -> str:
    """The same for a command; with neither, the known ones."""
    known = list(known)
    ours, remark = COMMANDS.get(name, ("", ""))
    if ours in known or (ours is None and "models" in known):
        return _sentence("command", name, ours, remark)
    text = unknown_name("command", name, known)
    return text if "did you mean" in text else f"{text}; known: {', '.join(known)}"


def _sentence(what: str, name: str, ours: str | None, remark: str) -> str:
    if ours is None:
        return f"unknown {what} {name!r}: {remark}"
    return f"unknown {what} {name!r}; use {ours!r}" + (f": {remark}" if remark else "")
