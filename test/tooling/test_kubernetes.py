"""deploy/kuberay.yaml and deploy/helm: valid documents, existing options, references that resolve.

The templates of the chart use a small part of Helm's language, which `render` implements."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml
from deploy_queries import DEPLOY

from llaisys.entrypoints.cli import build_parser
from llaisys.server.route.config import RouteConfig

CHART = DEPLOY / "helm" / "llaisys"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
RANGE = re.compile(
    r"\n *\{\{- range \$index := until \(int \.Values\.(\w+)\) \}\}(.*?)\n *\{\{- end \}\}", re.S
)
FIELD = re.compile(r"\{\{ (?:\$?\.Values\.(\w+)|\$?\.(Release)\.Name|\$(index)) \}\}")


def render(text: str, values: dict[str, Any], index: int = 0) -> str:
    def repeated(match: re.Match[str]) -> str:
        return "".join(render(match[2], values, i) for i in range(values[match[1]]))

    def field(match: re.Match[str]) -> str:
        if match[1]:
            return str(values[match[1]])  # KeyError: not in values.yaml
        return "test" if match[2] else str(index)

    rendered = FIELD.sub(field, RANGE.sub(repeated, text))
    assert "{{" not in rendered, rendered
    return rendered


def documents(**changes: Any) -> dict[str, Any]:
    """The rendered documents of the chart, by kind and name."""
    found: dict[str, Any] = {}
    for path in sorted((CHART / "templates").glob("*.yaml")):
        for document in yaml.safe_load_all(render(path.read_text(), VALUES | changes)):
            found[f"{document['kind']}/{document['metadata']['name']}"] = document
    return found


def kuberay() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))


def parse(command: list[str]) -> Any:
    """The options of a command line; an unknown one ends the test."""
    return build_parser().parse_args(command)


def containers(document: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(container, its pod) of every pod template within a document."""
    found = []
    if isinstance(document, dict):
        for value in document.values():
            found += containers(value)
        if "containers" in document:
            found += [(container, document) for container in document["containers"]]
    elif isinstance(document, list):
        found = [pair for part in document for pair in containers(part)]
    return found


def everything() -> list[dict[str, Any]]:
    return [*kuberay(), *documents().values()]


def test_documents_have_the_fields_of_their_kind() -> None:
    kinds = [document["kind"] for document in everything()]
    assert sorted(set(kinds)) == [
        "Deployment", "NetworkPolicy", "PodDisruptionBudget", "RayJob", "Service", "StatefulSet",
    ]  # fmt: skip
    for document in everything():
        assert document["apiVersion"] and document["spec"]
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])
        if document["kind"] in ("Deployment", "StatefulSet"):
            labels = document["spec"]["template"]["metadata"]["labels"]
            assert document["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_containers_have_images_with_versions_limits_and_known_volumes() -> None:
    pairs = containers({"all": everything()})
    assert len(pairs) == 4
    for container, pod in pairs:
        assert re.search(r":\d+\.\d+", container["image"])
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert "memory" in limits
        assert requests.get("nvidia.com/gpu") == limits.get("nvidia.com/gpu")
        volumes = {volume["name"] for volume in pod.get("volumes", [])} | {"data"}
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
        ports = {port["name"] for port in container.get("ports", [])}
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            if name in container:
                probe = container[name]["httpGet"]
                assert probe["port"] in ports and probe["path"] in ("/ready", "/live", "/health")


def test_services_select_pods_that_exist() -> None:
    found = documents()
    pods = [
        document["spec"]["template"]["metadata"]["labels"]
        for document in found.values()
        if document["kind"] in ("Deployment", "StatefulSet")
    ]
    for document in found.values():
        if document["kind"] == "Service":
            selector = document["spec"]["selector"]
            assert any(selector.items() <= labels.items() for labels in pods)
    assert found["StatefulSet/test-server"]["spec"]["serviceName"] == "test-server"
    assert found["Service/test-server"]["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("replicas", [1, 4, 12])
def test_the_routers_of_the_chart_know_every_server(replicas: int) -> None:
    found = documents(replicas=replicas)
    assert found["StatefulSet/test-server"]["spec"]["replicas"] == replicas
    ((router, _),) = containers(found["Deployment/test-router"])
    options = parse([*router["command"][1:], *router["args"]])
    urls = [f"http://test-server-{i}.test-server:8000" for i in range(replicas)]
    assert options.replicas == urls and RouteConfig(replicas=tuple(urls))


def test_the_server_of_the_chart_has_known_options() -> None:
    ((server, _),) = containers(documents(gpus=2)["StatefulSet/test-server"])
    options = parse(["serve", *server["args"]])
    assert options.tensor_parallel_size == server["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert options.drain_timeout == VALUES["drainSeconds"]


def test_the_ray_job_has_a_worker_for_every_replica() -> None:
    (job,) = [document for document in kuberay() if document["kind"] == "RayJob"]
    command = shlex.split(job["spec"]["entrypoint"])
    options = parse(command[1:])
    assert command[0] == "llaisys" and options.data_parallel_backend == "ray"
    cluster = job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert options.data_parallel_size == group["replicas"] == group["maxReplicas"]
    ((worker, _),) = containers(group)
    assert int(worker["resources"]["limits"]["cpu"]) >= options.n_threads
    assert int(worker["resources"]["limits"]["nvidia.com/gpu"]) == 1
    ((head, _),) = containers(cluster["headGroupSpec"])
    assert head["image"] == worker["image"]
    mounts = {mount["mountPath"] for mount in head["volumeMounts"]}
    assert str(options.api_key_file.parent) in mounts and "/models" in mounts
