"""`python -m llaisys`: the command line."""

import sys

from llaisys.entrypoints.cli import main

if __name__ == "__main__":
    sys.exit(main())
