"""`llaisys` and `python -m llaisys`: the command line."""

import sys

from llaisys.common.interrupts import end_on_interrupt

end_on_interrupt(True)  # while modules are imported

from llaisys.common.interpreter import drop_working_directory  # noqa: E402


def main() -> int:
    drop_working_directory()  # before anything else is imported
    from llaisys.entrypoints.cli import main as run

    end_on_interrupt(False)
    return run()


if __name__ == "__main__":
    sys.exit(main())
