"""The Prometheus queries of the dashboard and the alerts in deploy/."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def expressions() -> list[str]:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [row["query"] for row in board["templating"]["list"] if row["type"] == "query"]
    rules = yaml.safe_load((DEPLOY / "prometheus_rules.yml").read_text())
    return asked + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def names_asked() -> set[str]:
    return {name for text in expressions() for name in re.findall(r"llaisys:\w+", text)}


def names_served(metrics: str) -> set[str]:
    """Names of the samples in the text of /metrics, and of declared metrics."""
    found = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", metrics, re.MULTILINE):
        ends = ["_bucket", "_sum", "_count"] if kind == "histogram" else [""]
        found |= {name + end for end in ends}
    return found
