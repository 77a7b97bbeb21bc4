"""A model folder is data: a process started inside it imports none of its Python files.

The folder has a file for every importable module name, including optional modules that are not
installed. Each leaves a marker file when it runs.
"""

from __future__ import annotations

import ast
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from model_files import write_hf_model
from server_helpers import PACKAGE, ServerProcess

from llaisys.common.interpreter import child_environment, module_command

# Optional modules that our dependencies try to import.
OPTIONAL = ("orjson", "ujson", "simplejson", "brotli", "websockets", "wsproto", "email_validator",
            "sitecustomize", "usercustomize", "httpx", "torch", "transformers", "hf_xet",
            "h2")  # fmt: skip

WAYS = {
    # A console script: a file elsewhere that calls the entry point.
    "llaisys": ["{script}"],
    "python -m llaisys": ["-m", "llaisys"],
    "python -P -m llaisys": ["-P", "-m", "llaisys"],
}
PATHS = ("", ":", ".:", "{package}:", "relative:.")


class Trap:
    """A model folder with a Python file for every module name, and the marker files."""

    def __init__(self, base: Path) -> None:
        self.folder, self.marks, self.script = (
            base / "model",
            base / "marks",
            base / "bin" / "llaisys",
        )
        self.marks.mkdir()
        self.script.parent.mkdir()
        write_hf_model(self.folder)
        names = {module.name for module in pkgutil.iter_modules()}
        self.names = names | sys.stdlib_module_names | set(OPTIONAL) | {"fault_engine"}
        for name in self.names - {"llaisys"}:
            self.plant(name)
        self.script.write_text("import sys\nfrom llaisys.__main__ import main\nsys.exit(main())\n")

    def plant(self, name: str) -> None:
        code = f"open({str(self.marks / name)!r}, 'w').close()\nraise SystemExit(99)\n"
        for file in (self.folder / f"{name}.py", self.folder / "relative" / f"{name}.py"):
            file.parent.mkdir(exist_ok=True)
            file.write_text(code)

    def remove(self, names: set[str]) -> None:
        for name in names:
            for file in (self.folder / f"{name}.py", self.folder / "relative" / f"{name}.py"):
                file.unlink(missing_ok=True)

    def run(
        self, way: str, *arguments: str, path: str = "", stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        python_path = path.format(package=PACKAGE)
        env = {**os.environ, "PYTHONPATH": python_path, "PIP_NO_INDEX": "1"}
        if not python_path:
            del env["PYTHONPATH"]
        command = [part.format(script=self.script) for part in WAYS[way]]
        return subprocess.run(
            [sys.executable, *command, *arguments],
            cwd=self.folder, env=env, input=stdin, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    def check(self, done: subprocess.CompletedProcess[str] | None = None) -> None:
        errors = "" if done is None else done.stderr[-2000:]
        assert sorted(mark.name for mark in self.marks.iterdir()) == [], errors


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Trap:
    return Trap(tmp_path_factory.mktemp("trap"))


@pytest.fixture(scope="module")
def loose_trap(tmp_path_factory: pytest.TempPathFactory) -> Trap:
    """Return the names except those that Python itself imports from the working directory or
    PYTHONPATH before any project code runs."""
    trap = Trap(tmp_path_factory.mktemp("loose"))
    (empty := trap.folder.parent / "empty").mkdir()
    (empty / "program").mkdir()
    (empty / "program" / "__main__.py").write_text("import sys\nprint(list(sys.modules))\n")
    done = subprocess.run(
        [sys.executable, "-m", "program"], cwd=empty, capture_output=True, text=True, check=True
    )
    trap.remove({name.partition(".")[0] for name in ast.literal_eval(done.stdout)})
    trap.remove({"sitecustomize", "usercustomize", "encodings"})
    return trap


@pytest.mark.parametrize("way", ["llaisys", "python -P -m llaisys"])
def test_generate_and_chat_import_nothing_from_the_folder(trap: Trap, way: str) -> None:
    done = trap.run(way, "generate", "hello", "--model", ".", "--max-tokens", "2")
    trap.check(done)
    assert done.returncode == 0, done.stderr
    done = trap.run(way, "chat", "--model", ".", "--max-tokens", "2", stdin="hello\n")
    trap.check(done)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", ["llaisys", "python -m llaisys"])
def test_unsafe_path_imports_nothing_from_the_folder(loose_trap: Trap, way: str, path: str) -> None:
    done = loose_trap.run(
        way, "generate", "hello", "--model", ".", "--max-tokens", "2", path=path
    )  # fmt: skip
    loose_trap.check(done)
    assert done.returncode == 0, done.stderr


def test_pip_is_the_installed_module(trap: Trap, loose_trap: Trap, tmp_path: Path) -> None:
    """pip fails because it has no index, which shows that the real pip runs."""
    for folder, path in ((trap, ""), (loose_trap, ".:"), (loose_trap, "relative")):
        done = folder.run("llaisys", "pull", "pypi:no-such-model", path=path)
        folder.check(done)
        assert done.returncode == 1 and "No matching distribution" in done.stderr, done.stderr


def test_child_command_and_environment_are_each_safe(trap: Trap) -> None:
    """Two independent protections: each is tested alone."""
    plain = [sys.executable, "-m", "json.tool", "--help"]
    for command, env in (
        (module_command("json.tool", "--help"), dict(os.environ)),
        (plain, child_environment()),
    ):
        done = subprocess.run(command, cwd=trap.folder, env=env, capture_output=True, text=True)
        trap.check(done)
        assert done.returncode == 0, done.stderr
    subprocess.run(plain, cwd=trap.folder, capture_output=True)
    assert [mark.unlink() for mark in trap.marks.iterdir()]  # the trap is one


@contextmanager
def served(trap: Trap, *command: str, path: str) -> Iterator[ServerProcess]:
    with ServerProcess(
        ".",
        command=[part.format(script=trap.script) for part in command],
        env={"PYTHONPATH": path.format(package=PACKAGE)},
        cwd=trap.folder,
        session_file=trap.folder.parent / "s.db",
    ) as server:
        yield server.wait_ready()


@pytest.mark.parametrize(
    "way, path",
    [
        (["{script}", "serve"], "{package}"),
        (["{script}", "serve"], ".:{package}:relative"),
        (["-m", "llaisys", "serve"], "{package}:"),
        (["-m", "llaisys.server"], "relative:{package}"),
    ],
)
def test_server_and_engine_import_nothing_from_the_folder(
    trap: Trap, loose_trap: Trap, way: list[str], path: str
) -> None:
    folder = trap if path == "{package}" else loose_trap
    with served(folder, *way, path=path) as server, server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
        assert answer.status_code == 200, answer.text
    folder.check()
