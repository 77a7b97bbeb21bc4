"""deploy/ matches the server: every queried metric exists. (test/server/test_several_models.py
queries a running server.)"""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
from typing import Any

import pytest
import yaml
from deploy_queries import DEPLOY, expressions, names_asked

from llaisys.common.flags import OptionParser
from llaisys.server.config import ServerConfig
from llaisys.server.generation.service import SharedState
from llaisys.server.model_entries import entries_of
from llaisys.server.models.opening import open_models
from llaisys.server.options import add_arguments
from llaisys.server.sessions.store import SessionStore

SELECTED = re.compile(r"(llaisys:\w+)\{([^}]*)\}")
IMAGES = ("Containerfile", "Containerfile.cuda")
GROUPED = re.compile(r"by \(([^)]*)\)")


def metrics() -> dict[str, set[str]]:
    """Metric name -> labels, from the server's registry."""
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


def test_every_selected_label_exists() -> None:
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


def test_dashboard_equals_script_output() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboard", DEPLOY / "make_dashboard.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads((DEPLOY / "grafana.json").read_text()) == module.dashboard()


def known_options() -> set[str]:
    parser = OptionParser()
    add_arguments(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize("name", ["llaisys.service", *IMAGES])
def test_the_options_that_are_given_exist(name: str) -> None:
    known = known_options()
    lines = (DEPLOY / name).read_text().splitlines()
    starts = [
        line for line in lines if line.startswith(("ExecStart=", "ENTRYPOINT", "# podman run"))
    ]
    asked = set(re.findall(r"--[a-z][a-z-]+", " ".join(starts)))
    assert asked and asked <= known, asked - known


def test_systemd_unit_is_valid() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "llaisys.service")
    assert unit["Service"]["Restart"] == "on-failure"
    assert "-HUP" in unit["Service"]["ExecReload"]


def test_image_is_built_from_sources_only() -> None:
    """A copied build folder would contain paths of another machine."""
    ignored = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    assert {"build", ".venv", "**/*.so"} <= set(ignored)


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, rest) of a container file, continued lines joined."""
    text = (DEPLOY / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_has_no_compiler_and_no_root(name: str) -> None:
    rows = instructions(name)
    stages = [number for number, row in enumerate(rows) if row[0] == "FROM"]
    assert len(stages) == 2 and " AS build" in rows[stages[0]][1]
    assert all(":" in rows[number][1] for number in stages), "a base image without a version"
    last = rows[stages[1] :]
    words = {key: rest for key, rest in last}
    assert words["COPY"].startswith("--from=build ")
    assert not re.search(r"g\+\+|cmake|-devel", " ".join(rest for _, rest in last))
    names = [key for key, _ in last]
    assert words["USER"] == "llaisys" and names.index("USER") < names.index("ENTRYPOINT")
    assert words["VOLUME"] == "/data" and "LLAISYS_CACHE=/data/" in " ".join(r for _, r in last)
    assert "/health" in words["HEALTHCHECK"]
    json.loads(words["ENTRYPOINT"])


def test_the_cuda_image_builds_with_options_that_exist() -> None:
    text = " ".join(rest for key, rest in instructions("Containerfile.cuda") if key == "RUN")
    options = (DEPLOY.parent / "cmake/options.cmake").read_text()
    defined = re.findall(r"cmake\.define\.(\w+)=", text)
    assert defined and all(f"set({name} " in options for name in defined)


def compose() -> dict[str, Any]:
    merged: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    return merged


def test_compose_names_files_volumes_and_secrets_that_exist() -> None:
    document = compose()
    for service in document["services"].values():
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        else:
            assert re.search(r":v?\d+\.\d+", service["image"]), "an image without a version"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            exists = (
                (DEPLOY / source).is_file() if source[0] == "." else source in document["volumes"]
            )
            assert exists, volume
        assert set(service.get("secrets", [])) <= set(document["secrets"])
        assert set(service.get("depends_on", [])) <= set(document["services"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    ignored = (DEPLOY.parent / ".gitignore").read_text().splitlines()
    assert "/deploy/" + document["secrets"]["api_key"]["file"].removeprefix("./") in ignored


def test_the_commands_of_compose_have_options_that_exist() -> None:
    gpu = yaml.safe_load((DEPLOY / "compose.cuda.yml").read_text())
    assert (DEPLOY.parent / gpu["services"]["llaisys"]["build"]["dockerfile"]).is_file()
    for document in (compose(), gpu):
        command = document["services"]["llaisys"]["command"]
        assert {word for word in command if word.startswith("--")} <= known_options()


def test_prometheus_scrapes_the_server_under_the_name_of_the_alerts() -> None:
    services = compose()["services"]
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert f'job="{job["job_name"]}"' in (DEPLOY / "prometheus_rules.yml").read_text()
    (target,) = job["static_configs"][0]["targets"]
    name, port = target.split(":")
    assert services["llaisys"]["ports"][0].endswith(f":{port}") and name in services
    command = services["llaisys"]["command"]
    assert command[command.index("--allowed-host") + 1] == name
    key = job["authorization"]["credentials_file"]
    assert key == command[command.index("--api-key-file") + 1] == "/run/secrets/api_key"
    (source,) = yaml.safe_load((DEPLOY / "grafana_datasources.yml").read_text())["datasources"]
    assert source["url"].removeprefix("http://").split(":")[0] in services
    (board,) = yaml.safe_load((DEPLOY / "grafana_dashboards.yml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert any(path.startswith(board["options"]["path"]) for path in mounted)
