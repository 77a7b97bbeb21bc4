"""What deploy/ says about the server is true: every metric that is asked for exists. (A running
server is asked for them in test/server/test_several_models.py.)"""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
from typing import Any

import pytest
from deploy_queries import DEPLOY, expressions, names_asked

from llaisys.common.flags import OptionParser
from llaisys.server.config import ServerConfig
from llaisys.server.models.entries import entries_of
from llaisys.server.models.opening import open_models
from llaisys.server.options import add_arguments
from llaisys.server.service import SharedState
from llaisys.server.sessions.store import SessionStore

SELECTED = re.compile(r"(llaisys:\w+)\{([^}]*)\}")
GROUPED = re.compile(r"by \(([^)]*)\)")


def metrics() -> dict[str, set[str]]:
    """Every name that /metrics has -> its labels, as the server's own registry lists them."""
    entries = entries_of(["mock", "org/two"], {})
    config = ServerConfig(models=entries, api_keys=("k",))
    shared = SharedState(config, SessionStore(":memory:"))
    open_models(shared, None)
    found: dict[str, set[str]] = {}
    for family in shared.metrics.registry.collect():
        labels = set(getattr(family, "_labelnames", ()))
        labels |= {label for sample in family.samples for label in sample.labels}
        ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
        for end in ends.get(family.type, [""]):
            found[family.name + end] = labels | ({"le"} if end == "_bucket" else set())
    return found


def test_every_query_names_a_metric_that_exists() -> None:
    known, names = metrics(), names_asked()
    assert len(expressions()) > 30 and len(names) > 20
    assert names <= set(known), sorted(names - set(known))


def test_every_label_that_is_selected_is_one_of_the_metric() -> None:
    known = metrics()
    for text in expressions():
        for name, labels in SELECTED.findall(text):
            asked = set(re.findall(r"(\w+)=", labels))
            assert asked <= known[name] or not known[name], (name, labels)


def test_queries_are_well_formed() -> None:
    for text in expressions():
        assert text.count("(") == text.count(")") and text.count("{") == text.count("}")
        for labels in GROUPED.findall(text):
            assert all(re.fullmatch(r"\w+", part.strip()) for part in labels.split(","))


def test_the_dashboard_is_what_its_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboard", DEPLOY / "make_dashboard.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads((DEPLOY / "grafana.json").read_text()) == module.dashboard()


@pytest.mark.parametrize("name", ["llaisys.service", "Containerfile"])
def test_the_options_that_are_given_exist(name: str) -> None:
    parser = OptionParser()
    add_arguments(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    lines = (DEPLOY / name).read_text().splitlines()
    starts = [
        line for line in lines if line.startswith(("ExecStart=", "ENTRYPOINT", "# podman run"))
    ]
    asked = set(re.findall(r"--[a-z][a-z-]+", " ".join(starts)))
    assert asked and asked <= known, asked - known


def test_the_unit_is_one() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "llaisys.service")
    assert unit["Service"]["Restart"] == "on-failure"
    assert "-HUP" in unit["Service"]["ExecReload"]


def test_an_image_is_built_from_sources_alone() -> None:
    """A build folder that is copied along has the paths of another machine in it."""
    ignored = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    assert {"build", ".venv", "**/*.so"} <= set(ignored)
