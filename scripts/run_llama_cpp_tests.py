#!/usr/bin/env python3
"""Run the server tests of llama.cpp, from its source tree, against this server.

    scripts/run_llama_cpp_tests.py LLAMA_CPP --models DIR [--any-words] [arguments of pytest]

LLAMA_CPP is a checkout of llama.cpp; its files are not changed. `ServerProcess` of its tests starts
`llama-server`: here that command line is translated into one of `llaisys serve`. Servers with equal
options are kept between tests; a test that fails on a kept server runs again on a new one. DIR has
stories260K.gguf, the model of most tests, and may have stories260K-infill.gguf. Tiny random
encoders replace the embedding model and the reranker. --any-words: the words that llama.cpp samples
with its own random numbers are not compared. The last lines are a table of counts by file.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
import tempfile
import types
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_tests import ROOT, START_SECONDS, Servers, run

sys.path[:0] = [str(ROOT / "python"), str(ROOT / "test" / "helpers")]
# Options of llama-server with an equivalent here, those without one, and those of `Models`.
SAME = {
    "--host": "--host",
    "--temp": "--temperature",
    "--seed": "--seed",
    "--threads": "--threads",
    "--batch-size": "--max-num-batched-tokens",
    "--parallel": "--max-num-seqs",
    "--api-key": "--api-key",
    "--pooling": "--pooling",
    "--cors-origins": "--allowed-origin",
    "--slot-save-path": "--slot-save-path",
}
IGNORED = ("--port", "--ubatch-size", "--n-gpu-layers", "-fa", "-ctk", "-ctv", "--tags",
           "--reasoning-format", "--n-predict", "--hf-file", "--cache-ram",
           "--spec-type", "--spec-draft-n-max", "--spec-draft-n-min", "--model-draft",
           "--lora")  # fmt: skip
OTHER = ("--hf-repo", "--ctx-size", "--alias", "--chat-template", "--chat-template-file")
# Model names in tests; llama.cpp answers to every name.
MODEL_NAME = re.compile(r'model"?\s?[:=]\s?"([\w.-]+)"|"(codellama70b)"')
SWITCHES = ("--metrics", "--slots", "--no-slots", "--context-shift", "--no-ui")


def translate(arguments: Sequence[str], models: Models) -> list[str]:
    """The arguments of `llaisys serve` for those of llama-server."""
    options: list[str] = []
    found: dict[str, str] = {}
    items = iter(arguments)
    for name in items:
        if name in SWITCHES:
            options.append(name)
        elif name in SAME:
            options += [SAME[name], next(items)]
        elif name == "--reasoning":  # llama-server gives it to the template
            switch = {"enable_thinking": next(items) != "off"}
            options += ["--chat-template-kwargs", json.dumps(switch)]
        elif name in IGNORED:
            next(items)
        else:
            found[name] = next(items) if name in OTHER else ""
    if "--metrics" not in options:
        options.append("--no-metrics")
    if context := found.get("--ctx-size"):
        slots = options[options.index("--max-num-seqs") + 1] if "--max-num-seqs" in options else 1
        size = int(context) // (1 if "--kv-unified" in found else int(slots))
        options += ["--max-model-len", str(size)]
    if alias := found.get("--alias"):
        options += ["--served-model-name", *alias.split(","), *names_in_test()]
    if "--embedding" not in found and "--reranking" not in found:
        options += ["--chat-template", str(models.template(found))]
    return ["--model", str(models.find(found)), *options]


def names_in_test() -> list[str]:
    file = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    text = (Path("unit") / Path(file).name).read_text() if file else ""
    return sorted({one or two for one, two in MODEL_NAME.findall(text)})


class Models:
    """Files for the models that the tests name."""

    def __init__(self, folder: Path, made: Path) -> None:
        self.folder = folder
        self.made = made

    def find(self, options: dict[str, str]) -> Path:
        if "--reranking" in options:
            return self.reranker
        repository = options.get("--hf-repo", "")
        if "--embedding" in options and "stories" not in repository:
            return self.encoder
        if "stories260K" not in repository and repository != "ggml-org/models":
            raise FileNotFoundError(f"the model {repository} is not here")
        name = "stories260K-infill.gguf" if "infill" in repository else "stories260K.gguf"
        return self.folder / name

    def template(self, options: dict[str, str]) -> Path:
        """The given chat template, or ChatML, which is llama.cpp's default. llama.cpp adds the BOS
        token where the template does not."""
        from model_files import CHATML  # type: ignore[import-not-found]

        if file := options.get("--chat-template-file"):
            text = Path(file).read_text()
        else:
            text = options.get("--chat-template", "")
            text = text if "{" in text else CHATML
        path = self.made / f"template-{zlib.crc32(text.encode())}.jinja"
        path.write_text(text if "bos_token" in text else "{{ bos_token }}" + text)
        return path

    @functools.cached_property
    def encoder(self) -> Path:
        return self._encoder("Model", "mean_tokens")

    @functools.cached_property
    def reranker(self) -> Path:
        return self._encoder("ForSequenceClassification", "")

    def _encoder(self, head: str, pooling: str) -> Path:
        from encoder_models import make_encoder, save_encoder  # type: ignore[import-not-found]

        model = make_encoder("bert", head, max_position_embeddings=1024)
        return save_encoder(model, self.made / head, pooling)


class Kept:
    """A running server in the role of `subprocess.Popen`: the tests do not stop it."""

    def __init__(self, servers: Servers, port: int) -> None:
        self.pid = servers.process(port).pid
        self.poll = servers.process(port).poll
        self.returncode = None

    def terminate(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        return 0


def install(utils: Any, servers: Servers, models: Models) -> None:
    """Make `ServerProcess` of llama.cpp's tests use `servers`."""
    start = utils.ServerProcess.start

    def start_kept(server: Any, timeout_seconds: int = 0) -> None:
        def popen(command: Sequence[str], **_: Any) -> Kept:
            server.server_port = servers.start(translate(command[1:], models))
            return Kept(servers, server.server_port)

        utils.subprocess = types.SimpleNamespace(Popen=popen, TimeoutExpired=TimeoutError)
        start(server, int(START_SECONDS))

    utils.ServerProcess.start = start_kept
    utils.ServerPreset.load_all = staticmethod(lambda: None)  # downloads models


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=None)
    parser.add_argument("--any-words", action="store_true")
    known, rest = parser.parse_known_args()
    folder = known.models.resolve()
    logs = known.logs.resolve() if known.logs else None

    os.chdir(known.llama_cpp / "tools" / "server" / "tests")
    sys.path.insert(0, ".")
    sys.modules.setdefault("wget", types.ModuleType("wget"))  # nothing is downloaded
    import utils  # type: ignore[import-not-found]

    if known.any_words:
        utils.match_regex = lambda _, text: bool(text)
    settings = ["-m", "not slow", "-p", "no:cacheprovider"]
    with tempfile.TemporaryDirectory(prefix="llama-cpp-tests-") as name:
        made = Path(name)
        servers = Servers(logs or made)
        install(utils, servers, Models(folder, made))
        return run(settings, rest, servers, again=True)


if __name__ == "__main__":
    sys.exit(main())
