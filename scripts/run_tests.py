#!/usr/bin/env python3
"""Run the Python tests by suite, several files at a time, and say what is left out and why.

    scripts/run_tests.py                              everything that can run here
    scripts/run_tests.py --suite core                 only the native core
    scripts/run_tests.py --suite quick                everything but the slow suites
    scripts/run_tests.py --workers 0                  one file after the other, in one process
    scripts/run_tests.py --run-hf always --model-path DIR
    scripts/run_tests.py --suite engine -- -k stop    what follows -- goes to pytest

`auto` runs a group when what it needs is there, `always` fails when it is not, `never` leaves it
out. Anything left out is listed before the tests start; nothing is dropped in silence.

With --again N, up to N failed tests are run once more by themselves when all others are through;
only what fails twice fails the run. What passed the second time is named: each is a defect.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST_DIR = ROOT / "test"

# A suite is a folder of test/ with test files in it, or one of these.
GROUPS = {
    "browsers": ("webui/test_*.py",),
    "soak": ("engine/test_engine_soak.py",),
    "ray": ("engine/test_ray.py", "server/test_ray_replicas.py"),
}
# The longest of the other files: they start first, so that none is left to one worker at the end.
LONGEST = (
    "tokenization/test_tokenization.py",
    "server/test_online_real_model_multisession.py",
    "server/test_several_models.py",
    "server/test_online_schema.py",
    "models/test_answers.py",
    "models/test_infer.py",
    "server/test_online_structured.py",
    "server/test_route.py",
    "server/test_online_many_clients.py",
    "server/test_long_sessions.py",
    "server/test_online_tools.py",
    "server/test_online_disaggregation.py",
    "server/test_online_replicas.py",
    "models/test_load_interrupted.py",
    "engine/test_pipeline_parallel.py",
    "engine/test_tensor_parallel.py",
)
SLOW = ("browsers", "clients", "attack", "soak", "ray")  # what `quick` leaves out
SUITES = sorted({path.parent.name for path in TEST_DIR.glob("*/test_*.py")} | set(GROUPS))
WHEN = ("auto", "always", "never")
FAILED = ROOT / ".pytest_cache/v/cache/lastfailed"  # where pytest keeps the names of failed tests
TESTS_FAILED = 1  # pytest's exit code: some failed, and nothing else went wrong


def files_of(suite: str) -> list[Path]:
    """The test files of a suite; `all`: every test file, `quick`: those outside the slow suites."""
    if suite in ("all", "quick"):
        slow = [path for name in SLOW for path in files_of(name)]
        rest = set(TEST_DIR.glob("*/test_*.py")) - set(slow)
        first = [path for name in LONGEST if (path := TEST_DIR / name) in rest]
        return [*(slow if suite == "all" else []), *first, *sorted(rest - set(first))]
    patterns = GROUPS.get(suite, (f"{suite}/test_*.py",))
    return sorted(path for pattern in patterns for path in TEST_DIR.glob(pattern))


def group_runs(name: str, when: str, obstacle: str | None) -> bool:
    """Whether the tests marked `name` run; prints why not. `obstacle`: what is missing, or None."""
    if when == "never":
        print(f"left out: {name} tests (--run-{name} never)")
        return False
    if obstacle is None:
        return True
    if when == "always":
        sys.exit(f"error: --run-{name} always, but {obstacle}")
    print(f"left out: {name} tests ({obstacle})")
    return False


def model_obstacle(model_path: Path | None) -> str | None:
    if model_path is None:
        return "no --model-path DIR was given"
    if not (model_path / "config.json").is_file():
        sys.exit(f"error: --model-path {model_path}: no config.json there")
    return None


def cuda_obstacle() -> str | None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver is installed"
    return None


def default_workers() -> int:
    """More than cores: tests of servers wait for much of their time."""
    cores = len(os.sched_getaffinity(0))
    return max(4, cores + cores // 2)


def parse_arguments(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    own, pytest_arguments = arguments, []
    if "--" in arguments:
        cut = arguments.index("--")
        own, pytest_arguments = arguments[:cut], arguments[cut + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=["all", "quick", *SUITES], default="all")
    parser.add_argument("--run-parity", choices=WHEN, default="auto", help="needs transformers")
    parser.add_argument("--run-hf", choices=WHEN, default="auto", help="needs --model-path")
    parser.add_argument("--run-cuda", choices=WHEN, default="auto", help="needs a GPU")
    parser.add_argument("--model-path", type=Path, metavar="DIR", help="a real model's directory")
    parser.add_argument("--list", action="store_true", help="print the files and stop")
    parser.add_argument(
        "--workers",
        type=int,
        default=default_workers(),
        metavar="N",
        help="files that run at a time (default: %(default)s); 0: no worker processes",
    )
    parser.add_argument(
        "--again", type=int, default=0, metavar="N", help="run up to N failed tests once more"
    )
    return parser.parse_args(own), pytest_arguments


def main(arguments: list[str]) -> int:
    options, pytest_arguments = parse_arguments(arguments)
    files = files_of(options.suite)
    if options.list:
        print(*[path.relative_to(ROOT) for path in files], sep="\n")
        return 0
    if not files:
        sys.exit(f"error: suite '{options.suite}' has no test file in {TEST_DIR}")

    if options.suite != "all":
        others = len(files_of("all")) - len(files)
        print(f"left out: {others} test files outside the suite '{options.suite}'")
    transformers = importlib.util.find_spec("transformers")
    unwanted = []
    parity_obstacle = None if transformers else "transformers is not installed"
    if not group_runs("parity", options.run_parity, parity_obstacle):
        unwanted.append("not parity")
    if not group_runs("hf", options.run_hf, model_obstacle(options.model_path)):
        unwanted.append("not hf")
    if options.suite in ("all", "quick") and not group_runs(
        "cuda", options.run_cuda, cuda_obstacle()
    ):
        files = [path for path in files if path.parent.name != "cuda"]

    command = [sys.executable, "-m", "pytest", "--cpu-by-file=25", *map(str, files)]
    if unwanted:
        command += ["-m", " and ".join(unwanted)]
    if options.model_path:
        command += ["--model-path", str(options.model_path.resolve())]
    sys.stdout.flush()
    # No stray PYTHONPATH: it is the installed package that is tested. Bytecode is kept, or each of
    # the processes that the tests start would compile all modules.
    dropped = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {key: value for key, value in os.environ.items() if key not in dropped}

    if options.workers > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # torch: idle threads would take cores

    def run(*more: str) -> int:
        return subprocess.run(
            [*command, *pytest_arguments, *more], cwd=ROOT, env=environment
        ).returncode

    # A worker takes whole files, in the order given: the slow suites first.
    parallel = [f"--workers={options.workers}"]
    if not options.again:
        return run(*parallel)
    FAILED.unlink(missing_ok=True)
    status = run(*parallel)
    failed = sorted(json.loads(FAILED.read_text())) if FAILED.is_file() else []
    if status != TESTS_FAILED or not 0 < len(failed) <= options.again:
        return status
    print(f"\nonce more, by themselves: {len(failed)} tests that failed", flush=True)
    status = run("--last-failed")
    if status == 0:
        print("failed once and passed when run alone, each a defect:", *failed, sep="\n  ")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
