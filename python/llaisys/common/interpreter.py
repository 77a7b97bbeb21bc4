"""Removes the working directory from the module search path.

Users start programs inside a downloaded model folder. `python -m` and relative entries of
PYTHONPATH put it first on `sys.path`, so that its `numpy.py` would be imported. Imports only `os`
and `sys`.
"""

import os
import sys

# The folder of the package; always on the path.
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def drop_working_directory() -> None:
    """Remove the working directory and relative entries of PYTHONPATH from `sys.path`. For the
    programs of this package only, not for `import llaisys`."""
    unsafe = _relative_folders() - {ROOT}
    sys.path[:] = [entry for entry in sys.path if entry and os.path.realpath(entry) not in unsafe]


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module; use with `child_environment`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """Return the environment with absolute entries in PYTHONPATH, also for children of children."""
    entries = [entry for entry in _python_path() if os.path.isabs(entry)]
    if ROOT in _relative_folders():
        entries.append(ROOT)
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(entries)}
    if not entries:
        del environment["PYTHONPATH"]
    return environment


def _python_path() -> list[str]:
    """Return the entries of PYTHONPATH; none with `python -E`."""
    return (
        [] if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "").split(os.pathsep)
    )


def _relative_folders() -> set[str]:
    """Return the real paths of the working directory and of relative entries of PYTHONPATH, without
    those that are also absolute entries."""
    given = _python_path()
    try:
        found = {os.path.realpath(entry) for entry in ("", *given) if not os.path.isabs(entry)}
    except OSError:  # the working directory was removed
        return set()
    return found - {os.path.realpath(entry) for entry in given if os.path.isabs(entry)}
