#!/usr/bin/env python3
"""Run the rings of tests one after the other, stop with the first that fails, and print the time of each.

``tests/rings.py fast`` runs the ring that needs no container, no browser and few seconds a test; ``all`` runs every
ring, and builds the image of the cluster while the first ones run; ``measure`` takes figures of the machine,
``sites`` runs a site's rarer cases, ``release`` what depends on the release of Slurm, which SLURM names, and
``thorough`` the fast ring with more random cases.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMES = "CADENZA_TEST_TIMES"
"""Names the file to which tests/conftest.py writes the time of each test."""
SLOWEST = 10


@dataclass(frozen=True)
class Ring:
    """Tests that run together: their marks, and further options of pytest."""

    name: str
    marks: str
    options: tuple[str, ...]
    needs: str = ""
    """The preparation without which it cannot begin."""
    folder: str = "tests"


# Collecting them takes each process seconds, for nothing.
ELSEWHERE = ("--ignore=tests/cluster", "--ignore=tests/vm", "--ignore-glob=*/test_wheels.py")
PROCESSES = str((os.cpu_count() or 1) + 1)
"""One more than processors, since for a third of their time tests wait."""
# Importing the frameworks takes longer than many a test, and all of their tests are slow.
FAST = Ring(
    "fast", "not cluster and not browser and not slow and not packages and not vm",
    ("-n", PROCESSES, "--dist", "worksteal", *ELSEWHERE, "--ignore-glob=*/test_integrations_*.py",
     "--hypothesis-profile=quick"),
)  # fmt: skip
THOROUGH = Ring("fast, more random cases", FAST.marks, (*FAST.options[:-1], "--hypothesis-profile=thorough"))
SLOW = Ring(
    "slow", "(slow or browser) and not cluster",
    ("-n", "2", "--dist", "loadscope", *ELSEWHERE, "--hypothesis-profile=thorough"), "browser",
)  # fmt: skip
ON_CLUSTER = "tests/cluster"
CLUSTER = Ring(
    "cluster", "cluster and not measurement and not sites", ("-n", "2", "--dist", "loadscope"), "image", ON_CLUSTER,
)  # fmt: skip
SITES = Ring("sites", "sites", ("-n", "0"), "image", ON_CLUSTER)
BY_RELEASE = (
    "gateway_cluster", "opt_in", "output_files", "test_lanes.py", "test_moves", "test_preemption.py", "test_tuning",
    "test_turns.py",
)  # fmt: skip
RELEASE = Ring(
    "cluster of one release of Slurm", CLUSTER.marks,
    (*CLUSTER.options, "-k", " or ".join(BY_RELEASE)),
    "image", ON_CLUSTER,
)  # fmt: skip
MEASURE = Ring("measure", "measurement", ("-n", "0"), "image", ON_CLUSTER)
RINGS = {
    "fast": (FAST,),
    "all": (FAST, SLOW, CLUSTER),
    "thorough": (THOROUGH,),
    "measure": (MEASURE,),
    "sites": (SITES,),
    "release": (RELEASE,),
}
PREPARATIONS = {"browser": ("ensure-browser",), "image": ("ensure-docker", "build")}
"""Scripts of container/; in this order, since two package managers at once would wait for each other."""


def prepare(name: str) -> float:
    """Run the scripts of a preparation; return the seconds that they took, or end with a failed one's exit code."""
    began = time.monotonic()
    for script in PREPARATIONS[name]:
        subprocess.run([ROOT / "container" / script], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def run(ring: Ring, times: Path) -> int:
    """Run a ring and return pytest's exit code."""
    command = [sys.executable, "-m", "pytest", ring.folder, "-m", ring.marks, *ring.options]
    # Without compiled files, each of the thousands of processes that tests start compiles the packages again.
    compiling = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(command, cwd=ROOT, env={**compiling, TIMES: str(times)}, check=False).returncode


def table(took: dict[str, float], slowest: list[tuple[float, str]]) -> str:
    """Return the rings' seconds and the slowest tests as text."""
    lines = [f"{name:<32}{seconds:8.0f} s" for name, seconds in took.items()]
    lines += ["", f"the {len(slowest)} slowest tests", *(f"{seconds:8.1f} s  {test}" for seconds, test in slowest)]
    return "\n".join(lines)


def main() -> int:
    """Run the rings that the command line names; return the first exit code that is not 0."""
    rings = RINGS[sys.argv[1]]
    took: dict[str, float] = {}
    tests: list[tuple[float, str]] = []
    code, began = 0, time.monotonic()
    with ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as folder:
        needs = [name for name in PREPARATIONS if any(ring.needs == name for ring in rings)]
        ready: dict[str, Future[float]] = {name: pool.submit(prepare, name) for name in needs}
        for ring in rings:
            since = time.monotonic()
            if ring.needs:
                try:
                    ready[ring.needs].result()
                except subprocess.CalledProcessError as error:
                    code = error.returncode
                    break
                took[f"waiting for the {ring.needs}"] = time.monotonic() - since
            since, times = time.monotonic(), Path(folder) / "times.json"
            code = run(ring, times)
            took[f"ring: {ring.name}"] = time.monotonic() - since
            if times.exists():
                tests += [(seconds, test) for test, seconds in json.loads(times.read_text())]
            if code:
                break
        pool.shutdown(cancel_futures=True)
    took["all"] = time.monotonic() - began
    print(f"\n{table(took, sorted(tests, reverse=True)[:SLOWEST])}")
    return code


if __name__ == "__main__":
    sys.exit(main())
