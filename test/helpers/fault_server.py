"""The program of the test servers (`server_helpers`).

    python test/helpers/fault_server.py [options of `llaisys serve`]

It runs the server's own code; only the engine process is `fault_engine` instead of
`llaisys.server.engine_client.process`, and the tokenizer is one that sees where it is called. Like
the product it imports next to nothing before the engine starts.
"""

from __future__ import annotations

import dataclasses
import sys
import threading

from fake_tokenizer import FakeTokenizer

PANIC = "the tokenizer panics"
UNTOUCHABLE = "not to be tokenised"
INLINE_CHARS = 4096  # what the server tokenises at once


class PanicException(BaseException):
    """As PyO3 raises it."""


class OffLoopTokenizer(FakeTokenizer):
    """Long texts must not be tokenised on the event loop, which is the main thread, and
    UNTOUCHABLE not at all: either is a 500."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        on_loop = threading.current_thread() is threading.main_thread()
        if on_loop and len(text) > INLINE_CHARS:
            raise AssertionError(f"{len(text)} characters were tokenised on the event loop")
        if text == UNTOUCHABLE:
            raise AssertionError("this text was tokenised")
        if text.startswith(PANIC):
            raise PanicException("a panic inside Rust")
        return super().encode(text, add_special_tokens)


def main() -> int:
    from llaisys.common.flags import OptionParser
    from llaisys.server.http_server import serve
    from llaisys.server.options import add_arguments, config_from_args

    parser = OptionParser()
    add_arguments(parser)
    parser.add_argument("--exit-delay", type=float, default=1.5)
    args = parser.parse_args()
    config = config_from_args(args)
    engine = dataclasses.replace(config.engine, model="mock", tokenizer=OffLoopTokenizer())
    health = dataclasses.replace(config.health, exit_delay=args.exit_delay)
    names = config.served_model_names or ("fake",)
    return serve(
        dataclasses.replace(
            config,
            engine=engine,
            engine_module="fault_engine",
            served_model_names=names,
            health=health,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
