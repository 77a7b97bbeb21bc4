"""Packages of npm against a real server: OpenAI's client and Vercel's AI SDK.

They are installed into build/node when that is not up to date; without node and npm, or without a
registry to install from, the tests are skipped and say so.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import script
from scripted_server import scripted_server
from server_helpers import ROOT, ServerProcess

SOURCES = Path(__file__).resolve().parent / "node"
FOLDER = ROOT / "build" / "node"
SCRIPT = {name: value for name, value in vars(script).items() if name.isupper()}

CLIENTS = {
    "openai": ["chat", "stream", "tools", "structured", "vectors"],
    "ai_sdk": ["chat", "stream", "tools", "structured"],
}


@pytest.fixture(scope="module")
def packages() -> Path:
    """A folder with the programs and the packages that they import."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm")
    FOLDER.mkdir(parents=True, exist_ok=True)
    manifest = (SOURCES / "package.json").read_text()
    stamp = FOLDER / "installed.json"
    if not stamp.exists() or stamp.read_text() != manifest:
        (FOLDER / "package.json").write_text(manifest)
        command = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--ignore-scripts"]
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            pytest.skip(f"npm cannot install the packages: {done.stderr.strip()[:200]}")
        stamp.write_text(manifest)
    for source in SOURCES.glob("*.mjs"):
        shutil.copy(source, FOLDER)
    return FOLDER


@pytest.fixture(scope="module")
def server(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with scripted_server(tmp_path_factory.mktemp("node"), "--api-key", script.KEY) as process:
        yield process


@pytest.mark.parametrize("name", CLIENTS)
def test_client(server: ServerProcess, packages: Path, name: str) -> None:
    command = ["node", f"{name}.mjs", server.url, json.dumps(SCRIPT), *CLIENTS[name]]
    done = subprocess.run(command, cwd=packages, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
