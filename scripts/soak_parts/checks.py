"""Checks after the traffic has ended."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

from soak_parts.server import BUDGET, Server, now, read_metrics, total
from soak_parts.traffic import Traffic

MIB = 1 << 20
GROWTH = 24 * MIB  # limit for the API process between the second and the last fifth of the run
WARM_SECONDS = 600.0  # minimum length of a run to check growth: caches fill up first
SETTLE_SECONDS = 30.0

Checks = dict[str, bool]
Metrics = dict[tuple[str, str], float]
IDLE = ("num_requests_running", "num_requests_waiting", "kv_cache_blocks_used",
        "key_open_sequences")  # fmt: skip


async def metrics_of(traffic: Traffic) -> Metrics:
    return read_metrics((await traffic.client("alice").get("/metrics")).text)


async def settle(traffic: Traffic) -> Metrics:
    """Wait until the server is idle, or time out."""
    until = now() + SETTLE_SECONDS
    while True:
        metrics = await metrics_of(traffic)
        if all(total(metrics, name) == 0 for name in IDLE) or now() > until:
            return metrics
        await asyncio.sleep(0.5)


async def check_all(
    server: Server, traffic: Traffic, samples: list[dict[str, Any]]
) -> tuple[Checks, dict[str, Any]]:
    """(check results, statistics)."""
    seen = traffic.seen
    metrics = await settle(traffic)
    checks: Checks = {
        "every answer was expected": not seen.failures,
        "survivors' tokens are those of the quiet run": seen.compared > 0 and not seen.mismatches,
        "nothing runs without requests": all(total(metrics, name) == 0 for name in IDLE),
    }
    checks["sessions hold what was confirmed"] = await sessions_hold(traffic)
    checks |= counters_add_up(traffic, metrics)
    flat, facts = memory_is_flat(server, samples)
    for client in traffic._clients.values():  # their idle connections count as descriptors
        await client.aclose()
    facts["descriptors_idle"] = await fewest_descriptors(server)
    checks |= flat
    checks["descriptors are flat"] = facts["descriptors_idle"] <= facts["descriptors"]["early"] + 8
    serious = [line for line in server.log if "exception" in line or '"unexpected"' in line]
    checks["no exception in the log"] = not serious
    facts["exceptions"] = serious[:5]
    facts["metrics"] = {
        name: total(metrics, name)
        for name in (
            "generation_tokens_total",
            "key_requests_total",
            "request_success_total",
            "model_loads_total",
            "model_unloads_total",
            "model_failures_total",
            "http_requests_total",
            "key_rejected_total",
        )
    }
    return checks, facts


async def sessions_hold(traffic: Traffic) -> bool:
    client, good = traffic.client("alice"), True
    listed = (await client.get("/v1/sessions")).json()["data"]
    names = {entry["id"] for entry in listed}
    for name, count in traffic.seen.sessions.items():
        messages = (await client.get(f"/v1/sessions/{name}")).json().get("messages", [])
        if len(messages) < count:  # an interrupted answer may have been stored
            traffic.seen.failures.append(f"session {name}: {len(messages)} of {count} messages")
            good = False
    return good and not names & traffic.seen.deleted


def counters_add_up(traffic: Traffic, metrics: Metrics) -> Checks:
    seen = traffic.seen
    began, ended = total(metrics, "key_requests_total"), total(metrics, "request_success_total")
    killed = sum(n for status, n in seen.statuses.items() if " 503" in status or " 500" in status)
    loaded = total(metrics, "model_state", 'state="ready"')
    loads, unloads = total(metrics, "model_loads_total"), total(metrics, "model_unloads_total")
    answered = total(metrics, "http_requests_total", 'status="200"')
    return {
        # A request whose engine died before accepting it is counted as started but not as ended.
        "requests that began have ended": 0 <= began - ended <= killed,
        "tokens that clients got were counted": seen.completion_tokens
        <= total(metrics, "generation_tokens_total"),
        "tokens of keys are those of models": total(metrics, "key_generation_tokens_total")
        >= total(metrics, "generation_tokens_total"),
        "answers that clients got were counted": seen.responses["200"] <= answered,
        "models that were loaded are here, unloaded or dead": 0
        <= loads - unloads - loaded
        <= total(metrics, "model_failures_total"),
    }


def memory_is_flat(server: Server, samples: list[dict[str, Any]]) -> tuple[Checks, dict[str, Any]]:
    fifth = max(1, len(samples) // 5)
    early = statistics.median(row["resident"] for row in samples[fifth : 2 * fifth] or samples)
    late = statistics.median(row["resident"] for row in samples[-fifth:])
    most = max(row["engines"] for row in samples)
    facts = {
        "resident_mib": {"early": round(early / MIB, 1), "late": round(late / MIB, 1)},
        "engines_most_mib": round(most / MIB, 1),
        "budget_mib": BUDGET // MIB,
        "descriptors": {
            "early": int(statistics.median(row["descriptors"] for row in samples[: 2 * fifth])),
            "most": max(row["descriptors"] for row in samples),
        },
    }
    checks = {"memory of the engines stays in the budget": most <= BUDGET}
    if samples[-1]["seconds"] - samples[0]["seconds"] > WARM_SECONDS:
        checks["memory of the API process is flat"] = late - early < GROWTH
    return checks, facts


async def fewest_descriptors(server: Server) -> int:
    """Minimum over a few seconds, because closing connections takes time."""
    fewest = server.descriptors
    for _ in range(20):
        await asyncio.sleep(0.1)
        fewest = min(fewest, server.descriptors)
    return fewest
