"""`llaisys`: the command line. A command imports the heavy modules that it needs."""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from llaisys.common.errors import LlaisysError
from llaisys.common.flags import OptionParser
from llaisys.common.logs import show_devices
from llaisys.entrypoints import cli_bench, cli_chat, cli_generate, cli_serve, cli_tools

SHOWING_DEVICES = ("chat", "generate", "bench")  # a server has it in its log
DESCRIPTION = "NovaInfer: run and serve language models."


def build_parser() -> OptionParser:
    parser = OptionParser(prog="llaisys", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    cli_serve.add_command(commands)
    cli_generate.add_command(commands)
    cli_chat.add_command(commands)
    cli_tools.add_commands(commands)
    cli_bench.add_commands(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status. User errors print one line."""
    # Numpy's BLAS is not used; its threads would spin after the import.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        parser = build_parser()
        options = parser.parse_args(arguments)
        if options.command is None:
            parser.print_help()
            return 0
        with show_devices(sys.stderr) if options.command in SHOWING_DEVICES else nullcontext():
            return int(options.run(options))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output is gone
        return 141
    except (LlaisysError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
