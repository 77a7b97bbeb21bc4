"""Where Python looks for modules: never in the working directory.

People start the product inside the folder of a model that they downloaded. `python -m` and an empty
or relative entry of PYTHONPATH put that folder before everything else, so that its `numpy.py` would
be run. Needs nothing but `os` and `sys`, which every interpreter has read before.
"""

import os
import sys

# The folder that holds the package; kept in every case, or nothing of ours could be imported.
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))


def drop_working_directory() -> None:
    """Take the working directory, and what PYTHONPATH gives relative to it, off `sys.path`. For the
    programs of this package: a library leaves its user's path alone."""
    unsafe = _relative_folders() - {ROOT}
    sys.path[:] = [entry for entry in sys.path if entry and os.path.realpath(entry) not in unsafe]


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as a program; goes with `child_environment`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """This process's environment with a path of absolute entries, for the interpreters that a
    child starts as well."""
    entries = [entry for entry in _python_path() if os.path.isabs(entry)]
    if ROOT in _relative_folders():
        entries.append(ROOT)
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(entries)}
    if not entries:
        del environment["PYTHONPATH"]
    return environment


def _python_path() -> list[str]:
    """As this interpreter was given it; `python -E` was given none."""
    return (
        [] if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "").split(os.pathsep)
    )


def _relative_folders() -> set[str]:
    """The working directory and the entries of PYTHONPATH that mean something else in another;
    those that somebody wrote out in full are left alone."""
    given = _python_path()
    try:
        found = {os.path.realpath(entry) for entry in ("", *given) if not os.path.isabs(entry)}
    except OSError:  # the working directory is gone
        return set()
    return found - {os.path.realpath(entry) for entry in given if os.path.isabs(entry)}
