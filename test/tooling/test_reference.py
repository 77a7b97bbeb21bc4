"""docs/reference is what scripts/generate_reference.py writes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> Any:
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location(
        "generate_reference", ROOT / "scripts" / "generate_reference.py"
    )
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


@pytest.fixture(scope="module")
def pages(generator: Any) -> dict[str, str]:
    found: dict[str, str] = generator.pages()
    return found


def test_reference_pages_follow_the_code(generator: Any, pages: dict[str, str]) -> None:
    assert not generator.differences(pages), "run scripts/generate_reference.py"


def test_every_request_field_has_a_description(generator: Any, pages: dict[str, str]) -> None:
    from reference_pages.application import application

    from llaisys.server.schemas.field_help import FIELD_HELP

    schemas = application().openapi()["components"]["schemas"]
    used = set()
    for name, schema in schemas.items():
        if "ValidationError" in name:
            continue
        short = name.rpartition("__")[2]
        for field, value in schema.get("properties", {}).items():
            assert value.get("description"), f"{short}.{field}: describe it in field_help.py"
            used |= {f"{short}.{field}"} & FIELD_HELP.keys() or {field}
    assert FIELD_HELP.keys() <= used


def test_every_c_function_is_listed(pages: dict[str, str]) -> None:
    import re

    for header in (ROOT / "include").rglob("*.h"):
        for name in re.findall(r"^LLAISYS_API[^(;]*?(\w+)\(", header.read_text(), re.MULTILINE):
            assert f"`{name}(" in pages["c_api.md"], name
