"""`python -m llaisys.server [MODEL] [options]`: `llaisys serve`, with the same exit status."""

import sys

from llaisys.common.interrupts import end_on_interrupt

end_on_interrupt(True)  # until the server handles signals

from llaisys.common.interpreter import drop_working_directory  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    from llaisys.common.errors import LlaisysError
    from llaisys.common.flags import OptionParser
    from llaisys.server.options import add_arguments, config_from_args

    parser = OptionParser(prog="llaisys serve", description="Serve models over HTTP.")
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        config = config_from_args(args)
        from llaisys.server.http_server import serve

        return serve(config)
    except LlaisysError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    drop_working_directory()  # before any other import
    sys.exit(main())
