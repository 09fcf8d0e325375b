#!/usr/bin/env python3
"""Time the service's rounds while browsers ask `cadenza web` for its pages, and without them, in turns in one run.

    benchmarks/speed/web_clients.py --hosts 1000 --jobs 10000 --rounds 100 --clients 200

The service and its site are those of scale.py. The pages are made in a process of their own on the service's store, at
the lower priority of the shipped unit. Each client is another user, as behind a site's web server, and asks anew every
five seconds, as the pages' script does: most of them for the page Now, some for turns and a host. In every second ten
rounds they are stopped. A round begins five seconds after the last one ended; at a site it is fifteen. The exit code is
1 when the 99th percentile of the rounds with clients is more than 5 % above that without.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import scale

from cadenza.slurm_plugin.web.web_pages import REFRESH_S

MOST = 1.05
BLOCK = 10
"""Rounds with clients, and then without: a client that goes on asks at once, so that one round alone is a burst."""
PAUSE_S = 5.0
PATHS = ("/", "/", "/", "/turns", "/hosts/n00001")
NICE = 10
"""Of the pages' process, as in docs/systemd/cadenza-web.service; the clients, on other machines at a site, have 19."""


async def client(socket: Path, number: int, taken_s: list[float]) -> None:
    """Ask for a page, and again ``REFRESH_S`` after the answer."""
    path = PATHS[number % len(PATHS)]
    asked = f"GET {path} HTTP/1.1\r\nHost: site\r\nConnection: close\r\nX-Remote-User: user{number}\r\n\r\n".encode()
    await asyncio.sleep(REFRESH_S * number / 200)
    while True:
        began_s = time.monotonic()
        reader, writer = await asyncio.open_unix_connection(socket)
        writer.write(asked)
        answer = await reader.read()
        writer.close()
        if answer.startswith(b"HTTP/1.1 200"):
            taken_s.append(time.monotonic() - began_s)
        await asyncio.sleep(REFRESH_S)


def clients(socket: Path, count: int, told: Path) -> None:
    """Be this many clients until SIGTERM; then write down the number of answers and their times."""
    os.nice(19)
    taken_s: list[float] = []

    async def everyone() -> None:
        await asyncio.gather(*(client(socket, number, taken_s) for number in range(count)))

    def end(*_: object) -> None:
        told.write_text(f"{len(taken_s)} answers, median {statistics.median(taken_s):.2f} s, p99"
                        f" {scale.quantile(taken_s, 0.99):.2f} s")  # fmt: skip
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    asyncio.run(everyone())


class Web:
    """The process that makes the pages, and that of their clients, which is stopped in every second ten rounds."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.pids: list[int] = []

    def before(self, number: int) -> None:
        """Start both after the first round; then stop the clients or let them go on, and wait."""
        if number == 1:
            self._start()
        elif number % BLOCK == 1:
            os.kill(self.pids[1], signal.SIGSTOP if number // BLOCK % 2 else signal.SIGCONT)
        time.sleep(PAUSE_S)

    def _start(self) -> None:
        config, socket = self.folder / "web.toml", self.folder / "web.sock"
        config.write_text(f'[service]\nstore = "{self.folder}/cadenza.db"\n')
        words = [sys.executable, "-m", "cadenza.slurm_plugin.cli", "web", "--listen", socket, "--proxy", "root"]
        served = subprocess.Popen(["nice", f"-n{NICE}", *words, "--config", config], stdout=subprocess.PIPE, text=True)
        assert served.stdout is not None  # noqa: S101 (for the type checker)
        if not served.stdout.readline().startswith("listening"):
            raise SystemExit("the pages did not start")
        if (child := os.fork()) == 0:
            # Browsers compute elsewhere: here they get only time that neither the service nor the pages want.
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            with contextlib.suppress(OSError):
                clients(socket, self.count, self.folder / "clients")
            os._exit(1)
        self.pids = [served.pid, child]

    def end(self) -> str:
        """End both; return what the clients saw, and the pages' CPU time."""
        served, child = self.pids
        os.kill(child, signal.SIGCONT)
        os.kill(child, signal.SIGTERM)
        if os.waitpid(child, 0)[1]:
            raise SystemExit("the clients ended")
        os.kill(served, signal.SIGTERM)
        used = os.wait4(served, 0)[2]
        told = (self.folder / "clients").read_text()
        return f"{told}; pages {used.ru_utime + used.ru_stime:.0f} s CPU, {used.ru_maxrss / 1024:.0f} MB"


def figures(rows: Sequence[Mapping[str, Mapping[str, float]]], clock: str) -> tuple[float, float]:
    """Return median and 99th percentile of whole rounds."""
    times = [sum(row[clock].values()) for row in rows]
    return statistics.median(times), scale.quantile(times, 0.99)


def main() -> int:
    """Run the rounds, and print both kinds and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=100, help="of each kind")
    parser.add_argument("--clients", type=int, default=200)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="web") as folder:
        web = Web(Path(folder), asked.clients)
        rounds: list[Any] = scale.measure(asked.hosts, asked.jobs, 2 * asked.rounds, Path(folder), before=web.before)[
            "rounds"
        ]
        print(web.end())
    ratios = {}
    print(
        "| time of a round | clients: median, p99 | none: median, p99 | ratio of medians, of p99 |\n|---|---|---|---|"
    )
    for name, clock in (("on the clock", "wall"), ("of the service's process", "cpu")):
        with_, without = (
            figures([row for at, row in enumerate(rounds) if at // BLOCK % 2 == kind], clock) for kind in (0, 1)
        )
        ratios[clock] = with_[1] / without[1]
        cells = (f"{one[0]:.3f}, {one[1]:.3f} s" for one in (with_, without))
        print(f"| {name} | {' | '.join(cells)} | {with_[0] / without[0]:.3f}, {ratios[clock]:.3f} |")
    return int(ratios["wall"] > MOST)


if __name__ == "__main__":
    sys.exit(main())
