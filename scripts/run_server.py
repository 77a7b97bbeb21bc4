"""Start the server of `make run`: `llaisys serve` with the defaults of the default model.

    scripts/run_server.py [ARGUMENT...]     arguments of `llaisys serve`; they win over the defaults

The default model comes with a draft head, which is used: docs/guides/speculative_decoding.md. A
model that is named is served as `llaisys serve` would.
"""

from __future__ import annotations

import os
import sys

from llaisys.entrypoints.cli import build_parser

DRAFTS = '{"method": "eagle", "num_speculative_tokens": 6}'


def arguments_of(given: list[str]) -> list[str]:
    """The given arguments and the defaults they leave open."""
    options = build_parser().parse_args(["serve", *given])  # a usage error ends here
    names_a_model = options.model or options.models or options.config
    if names_a_model or options.speculative_config is not None:
        return given
    return [*given, "--speculative-config", DRAFTS]


if __name__ == "__main__":
    arguments = arguments_of(sys.argv[1:])
    os.execv(sys.executable, [sys.executable, "-m", "llaisys", "serve", *arguments])
