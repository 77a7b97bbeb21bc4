"""A release: one version everywhere, a changelog that names every deprecated option, and wheels."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from llaisys.common.options import options_of
from llaisys.common.version import __version__
from llaisys.engine.config import EngineConfig
from llaisys.server.config import Limits, ServerConfig

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


def test_all_places_have_the_same_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    cmake = re.search(r"project\(llaisys VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
    changelog = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cmake is not None and cmake[1] == __version__
    assert changelog is not None and changelog[1] == __version__


@pytest.mark.parametrize("options", [EngineConfig, Limits, ServerConfig])
def test_the_changelog_names_every_deprecated_option(options: type) -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    for name, about, _ in options_of(options):
        for earlier in about.deprecated:
            assert f"| `{earlier}` | `{name}` |" in text


def test_the_extra_for_gpus_has_the_libraries_that_the_core_opens() -> None:
    names = {
        re.split(r"[<>=]", entry)[0]
        for entry in PROJECT["project"]["optional-dependencies"]["cuda"]
    }
    assert names == {"nvidia-cublas", "nvidia-nccl-cu13"}
    opened = (ROOT / "src/device/cuda/cublaslt.cpp").read_text()
    assert '"libcublasLt.so.13"' in opened
    assert '"libnccl.so.2"' in (ROOT / "src/parallel/nccl_library.cpp").read_text()


def test_nothing_is_compiled_for_the_machine_that_builds() -> None:
    files = [ROOT / "CMakeLists.txt", ROOT / "Makefile", *(ROOT / "cmake").glob("*.cmake")]
    for file in files:
        assert not re.search(r"-m(arch|cpu|tune)=native", file.read_text()), file


def test_build_tools_are_no_dependency() -> None:
    wheel = PROJECT["project"]["optional-dependencies"]["wheel"]
    build = PROJECT["build-system"]["requires"]
    needed = {re.split(r"[<>=;]", entry)[0] for entry in PROJECT["project"]["dependencies"]}
    assert not needed & {re.split(r"[<>=;]", entry)[0] for entry in [*wheel, *build]}
    # Both are installed into build/tools.
    for stamp in (".installed", ".wheel"):
        rule = MAKEFILE.split(f"$(TOOLS)/{stamp}:")[1].split("\n\n")[0]
        assert "--python $(TOOLS)/bin/python install" in rule


def test_pip_of_debian_12_has_the_options_that_are_used() -> None:
    """pip 23.0 has --config-settings; its short form -C came with 23.1."""
    for file in (ROOT / "Makefile", ROOT / "deploy/Containerfile.cuda"):
        text = file.read_text()
        assert "--config-settings=" in text and " -C " not in text, file
