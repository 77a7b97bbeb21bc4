"""Runs the scenarios of a client: `python CLIENT.py URL SCENARIO...`, silent when all is well."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable


def run(scenarios: dict[str, Callable[[str], None]]) -> None:
    """Each scenario is given the server's address. The exit status is the number that failed."""
    url, *names = sys.argv[1:]
    failed = 0
    for name in names:
        try:
            scenarios[name](url)
        except Exception:
            failed += 1
            print(f"--- {name}", file=sys.stderr)
            traceback.print_exc()
    sys.exit(failed)
