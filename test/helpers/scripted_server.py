"""A real server whose model says what a script tells it: for clients that call tools or want JSON.

    python test/helpers/scripted_server.py MODEL [options of `llaisys serve`]

MODEL is a directory of `write_model`: a real tokenizer with a real chat template. Only the model's
arithmetic is replaced, by `scripted_engine`. Imports next to nothing before the engine starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from script import CONTEXT, MODEL, RULES, SCRIPT


def write_model(folder: Path, template: str | None = None) -> Path:
    """`template`: Qwen 3's unless another is named."""
    from chat_templates import QWEN3
    from model_files import tiny_config, write_hf_model, write_tiny_tokenizer

    path = folder / "model"
    write_hf_model(path, tiny_config(max_position_embeddings=CONTEXT), tokenizer=False)
    more = {"<tool_call>": False, "</tool_call>": False, "<think>": False, "</think>": False}
    write_tiny_tokenizer(path, template or QWEN3, more)
    return path


@contextlib.contextmanager
def scripted_server(
    folder: Path,
    *options: str,
    rules: Sequence[dict[str, Any]] = RULES,
    template: str | None = None,
) -> Iterator[Any]:
    from server_helpers import ServerProcess

    script = folder / "script.json"
    script.write_text(json.dumps(list(rules)))
    model = (str(write_model(folder, template)), "--served-model-name", MODEL)
    environment = {SCRIPT: str(script)}
    with ServerProcess(*model, *options, program="scripted_server", env=environment) as process:
        yield process.wait_ready()


def main() -> int:
    from llaisys.common.flags import OptionParser
    from llaisys.server.http_server import serve
    from llaisys.server.options import add_arguments, config_from_args

    parser = OptionParser()
    add_arguments(parser)
    config = config_from_args(parser.parse_args())
    return serve(dataclasses.replace(config, engine_module="scripted_engine"))


if __name__ == "__main__":
    sys.exit(main())
