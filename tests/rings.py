#!/usr/bin/env python3
"""Run the rings of tests, stop with the first that fails, and print the time of each.

``tests/rings.py fast`` runs the ring that needs no container, no browser and few seconds a test; ``all`` runs every
ring, that of the cluster, whose tests mostly wait, beside the others and as soon as its image is built; ``measure``
takes figures of the machine, ``sites`` runs a site's rarer cases, ``release`` what depends on the release of Slurm,
which SLURM names, and ``thorough`` the fast ring with more random cases.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
TIMES = "CADENZA_TEST_TIMES"
"""Names the file to which tests/conftest.py writes the time of each test."""
STOP = "CADENZA_TEST_STOP"
"""Names the file that is there once a ring has failed: tests/conftest.py skips what is left of a ring beside it."""
SLOWEST = 10


@dataclass(frozen=True)
class Ring:
    """Tests that run together: their marks, and further options of pytest."""

    name: str
    marks: str
    options: tuple[str, ...]
    needs: str = ""
    """The preparation without which it cannot begin."""
    files: str = ""
    """What a file with such tests has in it: to collect all files is to import all that is tested."""


# Importing the frameworks takes longer than many a test, and all of their tests are slow.
FAST = Ring(
    "fast", "not cluster and not browser and not slow and not packages and not vm",
    ("-n", "logical", "--dist", "worksteal", "--ignore-glob=*/test_integrations_*.py", "--hypothesis-profile=quick"),
)  # fmt: skip
THOROUGH = Ring("fast, more random cases", FAST.marks, (*FAST.options[:-1], "--hypothesis-profile=thorough"))
SLOW = Ring(
    "slow", "(slow or browser) and not cluster",
    ("-n", "2", "--dist", "loadscope", "--hypothesis-profile=thorough"), "browser", r"mark\.(slow|browser)",
)  # fmt: skip
# Most of what its tests do is to wait: three clusters keep two cores busy.
CLUSTER = Ring(
    "cluster",
    "cluster and not measurement and not sites",
    ("-n", "3", "--dist", "loadscope"),
    "image",
    "^tests/cluster/",
)
SITES = Ring("sites", "sites", ("-n", "0"), "image", r"mark\.sites")
BY_RELEASE = (
    "gateway_cluster", "opt_in", "output_files", "test_lanes.py", "test_moves", "test_preemption.py", "test_tuning",
    "test_turns.py",
)  # fmt: skip
RELEASE = Ring(
    "cluster of one release of Slurm", CLUSTER.marks,
    (*CLUSTER.options, "-k", " or ".join(BY_RELEASE)),
    "image", CLUSTER.files,
)  # fmt: skip
MEASURE = Ring("measure", "measurement", ("-n", "0"), "image", r"mark\.measurement")
LANES: dict[str, tuple[tuple[Ring, ...], ...]] = {
    "fast": ((FAST,),),
    "all": ((CLUSTER,), (FAST, SLOW)),
    "thorough": ((THOROUGH,),),
    "measure": ((MEASURE,),),
    "sites": ((SITES,),),
    "release": ((RELEASE,),),
}
"""Rings that run one after the other, beside those of another lane, whose output comes at its end."""
PREPARATIONS = {"browser": ("ensure-browser",), "image": ("ensure-docker", "build")}
"""Scripts of container/; in this order, since two package managers at once would wait for each other."""


def prepare(name: str) -> float:
    """Run the scripts of a preparation; return the seconds that they took, or end with a failed one's exit code."""
    began = time.monotonic()
    for script in PREPARATIONS[name]:
        subprocess.run([ROOT / "container" / script], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def paths(ring: Ring) -> list[str]:
    """Return what pytest collects for a ring."""
    if not ring.files:
        return ["tests"]
    files = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.glob("tests/*/test_*.py"))}
    return [path for path, text in files.items() if re.search(ring.files, path + text)]


def run(ring: Ring, folder: Path, output: IO[str] | None) -> int:
    """Run a ring and return pytest's exit code; its output goes to a file where another ring runs beside it."""
    command = [sys.executable, "-m", "pytest", *paths(ring), "-m", ring.marks, *ring.options]
    if output is None:  # the ring that is watched ends first: the other one's clusters come before it
        command = ["nice", "-n", "5", *command]
    # Where Python writes no compiled modules, each of the hundreds of processes that tests start compiles them again.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    variables |= {TIMES: str(folder / f"{ring.name}.json"), STOP: str(folder / "stop")}
    return subprocess.run(command, cwd=ROOT, env=variables, stdout=output, stderr=output, check=False).returncode


def table(took: dict[str, float], slowest: list[tuple[float, str]]) -> str:
    """Return the rings' seconds and the slowest tests as text."""
    lines = [f"{name:<32}{seconds:8.0f} s" for name, seconds in took.items()]
    lines += ["", f"the {len(slowest)} slowest tests", *(f"{seconds:8.1f} s  {test}" for seconds, test in slowest)]
    return "\n".join(lines)


@dataclass
class Run:
    """What the rings have come to so far."""

    folder: Path
    ready: dict[str, Future[float]]
    took: dict[str, float] = field(default_factory=dict)
    code: int = 0

    def lane(self, rings: Sequence[Ring], output: IO[str] | None) -> None:
        """Run rings one after the other, until one fails, here or in the other lane."""
        for ring in rings:
            since = time.monotonic()
            if ring.needs:
                try:
                    self.ready[ring.needs].result()
                except subprocess.CalledProcessError as error:
                    self.fail(error.returncode)
                self.took[f"waiting for the {ring.needs}"] = time.monotonic() - since
            if self.code:
                return
            since = time.monotonic()
            code = run(ring, self.folder, output)
            self.took[f"ring: {ring.name}"] = time.monotonic() - since
            if code:
                self.fail(code)

    def fail(self, code: int) -> None:
        """Keep the first exit code that is not 0, and stop the other lane."""
        self.code = self.code or code
        (self.folder / "stop").touch()


def main() -> int:
    """Run the rings that the command line names; return the first exit code that is not 0."""
    *beside, last = LANES[sys.argv[1]]
    needs = {ring.needs for rings in (*beside, last) for ring in rings}
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as folder:
        ready = {name: pool.submit(prepare, name) for name in PREPARATIONS if name in needs}
        found = Run(Path(folder), ready)
        outputs = [(Path(folder) / f"{number}.log").open("w+") for number, _ in enumerate(beside)]
        threads = [threading.Thread(target=found.lane, args=pair) for pair in zip(beside, outputs, strict=True)]
        for thread in threads:
            thread.start()
        found.lane(last, None)
        for thread, output in zip(threads, outputs, strict=True):
            thread.join()
            output.seek(0)
            sys.stdout.writelines(output)
        pool.shutdown(cancel_futures=True)
        times = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    tests = [(seconds, test) for ring in times for test, seconds in ring]
    found.took["all"] = time.monotonic() - began
    print(f"\n{table(found.took, sorted(tests, reverse=True)[:SLOWEST])}")
    return found.code


if __name__ == "__main__":
    sys.exit(main())
