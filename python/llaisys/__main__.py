"""`llaisys` and `python -m llaisys`: the command line."""

import sys

from llaisys.common.interpreter import drop_working_directory


def main() -> int:
    drop_working_directory()  # before anything else is imported
    from llaisys.entrypoints.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
