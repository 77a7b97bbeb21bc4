#!/usr/bin/env python3
"""Write docs/reference from the code: `scripts/generate_reference.py [--check]`.

--check compares the pages with the files and names those that differ; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "scripts")]


def pages() -> dict[str, str]:
    """File name -> its text."""
    from reference_pages.c_headers import c_api_page
    from reference_pages.environment import environment_page
    from reference_pages.families import families_page
    from reference_pages.http_api import http_pages
    from reference_pages.metrics import metrics_page
    from reference_pages.options import bench_page, cli_page, configuration_page, tools_page

    return {
        "cli.md": cli_page(),
        "cli_bench.md": bench_page(),
        "cli_tools.md": tools_page(),
        "configuration.md": configuration_page(),
        **http_pages(),
        "metrics.md": metrics_page(),
        "c_api.md": c_api_page(),
        "environment.md": environment_page(),
        "model_families.md": families_page(),
    }


def differences(generated: dict[str, str]) -> list[str]:
    """The pages that are missing, stale or left over, with the first differing lines."""
    found = []
    for name in sorted(generated.keys() | {path.name for path in REFERENCE.glob("*.md")}):
        path = REFERENCE / name
        before = path.read_text() if path.exists() else ""
        after = generated.get(name, "")
        if before != after:
            lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
            found.append("\n".join([f"docs/reference/{name}:", *list(lines)[2:8]]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="Compare, do not write")
    options = parser.parse_args()
    generated = pages()
    if options.check:
        found = differences(generated)
        if found:
            print("\n".join([*found, "run scripts/generate_reference.py"]), file=sys.stderr)
        return 1 if found else 0
    REFERENCE.mkdir(exist_ok=True)
    for path in REFERENCE.glob("*.md"):
        if path.name not in generated:
            path.unlink()
    for name, text in generated.items():
        (REFERENCE / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
