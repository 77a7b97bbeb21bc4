#!/usr/bin/env python3
"""Soak test: mixed traffic of every protocol with injected faults; checks at the end.

    scripts/soak.py --minutes 60 [--pause 1.0] [--fault-every 60] [--seed 1] [--report FILE]

Faults: an engine is killed, the disk is temporarily full, the wall clock jumps, the key file is
reloaded. Clients also disconnect, cancel and send invalid requests. Checks: completed requests have
the tokens of an undisturbed run, counters are consistent, sessions contain all confirmed messages,
memory and descriptors are constant, no process is left. Exit status 1 when a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from soak_parts.checks import check_all
from soak_parts.server import Server, now
from soak_parts.traffic import Traffic, as_json

DISK_FULL_SECONDS = 5.0
SAMPLE_SECONDS = 5.0
SAMPLES_PER_LINE = 60  # samples per progress line


async def faults(server: Server, traffic: Traffic, every: float, seed: int) -> dict[str, int]:
    """Inject faults until the traffic stops; returns the number of each kind."""
    chance, counts = random.Random(seed), {"kill": 0, "disk": 0, "clock": 0, "keys": 0}
    kinds: list[str] = []
    while True:
        try:
            await asyncio.wait_for(traffic.stopping.wait(), every)
            return counts
        except TimeoutError:
            pass
        kinds = kinds or chance.sample(list(counts), len(counts))
        kind = kinds.pop()
        counts[kind] += 1
        traffic.last_fault[kind] = now() + 1e6  # until the fault has ended
        if kind == "kill":
            server.kill_an_engine(chance.randrange(8))
        elif kind == "disk":
            server.fill_disk(True)
            await asyncio.sleep(DISK_FULL_SECONDS)
            server.fill_disk(False)
        elif kind == "clock":
            server.jump_clock(chance.choice([-86400.0, -3600.0, 0.0, 3600.0, 400 * 86400.0]))
        else:
            server.reload_keys()
        traffic.last_fault[kind] = now()


async def samples(server: Server, traffic: Traffic) -> list[dict[str, Any]]:
    found = []
    while not traffic.stopping.is_set():
        found.append(
            {
                "seconds": round(now(), 1),
                "resident": server.resident,
                "engines": server.engines_resident,
                "descriptors": server.descriptors,
            }
        )
        if len(found) % SAMPLES_PER_LINE == 0:
            show_progress(found[-1], traffic)
        await asyncio.sleep(SAMPLE_SECONDS)
    return found


def show_progress(sample: dict[str, Any], traffic: Traffic) -> None:
    seen = traffic.seen
    counts = {
        **{"answers": sum(seen.responses.values()), "hangups": seen.hangups},
        **{"compared": seen.compared, "mismatches": len(seen.mismatches)},
        **{"failures": len(seen.failures), "sessions": len(seen.sessions)},
    }
    print(json.dumps(sample | counts), *seen.failures[-1:], file=sys.stderr, flush=True)


async def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    server = Server(folder, not options.without_default_model)
    try:
        traffic = Traffic(server.url, server.models, options.seed, options.pause)
        await traffic.quiet_run()
        began = now()
        actors = [asyncio.create_task(traffic.loop(actor)) for actor in traffic.actors()]
        watching = asyncio.create_task(samples(server, traffic))
        breaking = asyncio.create_task(faults(server, traffic, options.fault_every, options.seed))
        await asyncio.sleep(60 * options.minutes)
        traffic.stopping.set()
        await asyncio.gather(*actors)
        counts, taken = await breaking, await watching
        seconds = now() - began
        checks, facts = await check_all(server, traffic, taken)
        await traffic.close()
        engines = server.engines
        status = server.stop()
        checks["the server ended with status 0"] = status == 0
        checks["no engine is left"] = not any(Path(f"/proc/{pid}").exists() for pid in engines)
    finally:
        if server.process.poll() is None:
            server.process.kill()
    health = sorted(traffic.seen.health) or [0.0]
    return {
        "passed": all(checks.values()),
        "checks": checks,
        "minutes": round(seconds / 60, 2),
        "faults": counts,
        "protocols": traffic.protocols,
        "health_ms": {
            "median": round(1e3 * statistics.median(health), 1),
            "p99": round(1e3 * health[int(0.99 * (len(health) - 1))], 1),
            "most": round(1e3 * health[-1], 1),
        },
        **facts,
        "seen": as_json(traffic.seen),
        "log": server.log[-200:],
        "samples": taken,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--pause", type=float, default=1.0, help="mean seconds between requests")
    parser.add_argument("--fault-every", type=float, default=20.0, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without-default-model", action="store_true", help="qwen and mock only")
    parser.add_argument("--report", type=Path, help="JSON file for everything that was seen")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        report = asyncio.run(soak(options, Path(folder)))
    if options.report is not None:
        options.report.write_text(json.dumps(report, indent=1))
    shown = {k: v for k, v in report.items() if k not in ("samples", "seen", "log")}
    print(json.dumps(shown, indent=1))
    print(json.dumps(report["seen"]["statuses"], indent=1))
    for failure in report["seen"]["failures"][:20] + report["seen"]["mismatches"][:5]:
        print(failure)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
