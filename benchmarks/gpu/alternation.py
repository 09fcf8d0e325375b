#!/usr/bin/env python3
"""The rows of ``acceptance.py`` in which two training jobs take turns on one GPU under a real agent.

``alternation.py rows NAME …`` prints a JSON line for each row. ``alternation.py job OUT [STEPS]`` is one of the
jobs; it writes a line for each boundary, with the moments at which it began and ended, and the loss in hexadecimal.
``plain`` instead of ``job`` is a script that knows nothing of Cadenza; its line is of the step.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registered_job import registered
from rows import Figures, NotRunError, check, require

from cadenza.sidecar import wire
from cadenza.sidecar.agent.telemetry.gpus import driver_version, nvml_devices

SIMULATED = bool(os.environ.get("SIMULATED_GPUS"))
LONG = bool(os.environ.get("ACCEPTANCE_LONG"))
SLICE_S = 0.15 if SIMULATED else 60.0 if LONG else 2.0
TURNS = 2
"""Turns of the other that each job waits for."""
PATIENCE_S = 600.0 if LONG else 240.0 if SIMULATED else 90.0
POLL_S = 0.005
AWAY_S = SLICE_S / 2
"""A boundary that takes longer was a turn of the other job."""
SWITCH_S = 2.0 if SIMULATED else 0.6
"""The most time between one job's last step and the other's first: 1 % of a slice of 60 s."""
OVERHEAD = 0.1 if SIMULATED else 0.02
KEPT_BYTES = (2 if SIMULATED else 64) << 20
WIDTH, LAYERS = (1280, 1) if SIMULATED else (4096, 64)
"""Hidden layers; with the momentum they take 31 MiB of the simulated GPU's 64, and 8 GiB of a GPU's."""
INPUTS = 2048
PLAIN_LAYERS = 1 if SIMULATED else 8
"""Layers of the script that the driver takes off the GPU: 1 GiB, because that is many times slower."""


@dataclass
class Job:
    """One job: its process, what it has written, and the fewest bytes that NVML has seen of it."""

    out: Path
    process: subprocess.Popen[bytes]
    fewest_bytes: int | None = None
    context: int = 0
    freed: int = 0
    """Its bytes by NVML before its training, and after it once it has freed all it can; 0 for one that was killed."""
    said: dict[str, int] = field(default_factory=dict)
    """The figures that it has written."""
    rows: list[tuple[float, float, str]] = field(default_factory=list)
    """When each boundary began and ended, and the loss before it."""

    def read(self) -> None:
        """Take what the job has written so far."""
        lines = self.out.read_text().splitlines(keepends=True) if self.out.exists() else []
        whole = [line.split() for line in lines if line.endswith("\n")]
        self.said = {words[0]: int(words[1]) for words in whole if len(words) == 2}  # noqa: PLR2004
        self.context, self.freed = self.said.get("context", 0), self.said.get("freed", 0)
        self.rows = [(float(words[0]), float(words[1]), words[2]) for words in whole if len(words) == 3]  # noqa: PLR2004

    @property
    def pids(self) -> set[int]:
        """Its processes, as far as it names them."""
        return {self.process.pid, *(value for key, value in self.said.items() if key.startswith("pid"))}

    @property
    def turns(self) -> int:
        """Return the finished turns of the other."""
        return sum(ended - began > AWAY_S for began, ended, _ in self.rows)


def train(role: str, out: str, steps: str = "1000000000") -> None:
    """Be one of the jobs."""
    import torch  # noqa: PLC0415 - only the jobs need it
    from checks import Gpu  # noqa: PLC0415

    from cadenza.sidecar import client  # noqa: PLC0415
    from cadenza.sidecar.client.offload import library_caches  # noqa: PLC0415

    gpu, plain = Gpu(), role == "plain"
    torch.manual_seed(4)
    inner = (torch.nn.Linear(WIDTH, WIDTH) for _ in range((PLAIN_LAYERS if plain else LAYERS) - 1))
    layers = [torch.nn.Linear(INPUTS, WIDTH), *inner]
    model = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10)).to(gpu.place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if not plain:
        client.attach(model, optimizer)
    with Path(out).open("a", buffering=1) as file:
        print("context", gpu.context, file=file)
        ended = time.monotonic()
        for _ in range(int(steps)):
            inputs, labels = torch.randn(4, INPUTS).to(gpu.place), torch.randint(0, 10, (4,)).to(gpu.place)
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            value = loss.item().hex()
            del loss, inputs, labels
            began = ended if plain else time.monotonic()
            if not plain:
                client.boundary()
            ended = time.monotonic()
            print(began, ended, value, file=file)
        client.detach()
        del model, optimizer, layers, inner
        gc.collect()
        library_caches.release([gpu.place])
        gpu.accelerator.empty_cache()
        print("freed", gpu.bytes_by_nvml() if gpu.nvml else 0, file=file)


@contextlib.contextmanager
def agent(folder: Path, *, plain: bool) -> Iterator[Path]:
    """Run an agent without a service and with short slices; yield its socket."""
    from cadenza.sidecar import orders  # noqa: PLC0415 - they need msgspec, which a machine with torch alone lacks
    from cadenza.sidecar.agent.driver import trial_record  # noqa: PLC0415

    place, state = folder / "agent.sock", folder / "state"
    settings = {"expert.socket": str(place), "expert.state_dir": str(state), "agent.keys": str(folder)}
    settings |= {"agent.driver_checkpoint": "unattached"} if plain else {}
    lines = ['expert.host = "bench"', *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    (folder / "cadenza.toml").write_text("\n".join([*lines, ""]))
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    facts = {"type": "Facts", "v": orders.VERSION, "jobs": [], "slice_s": SLICE_S, "min_run_s": SLICE_S / 3}
    facts |= {"share_between_users": True, "enforce": True}
    state.mkdir()
    if plain:
        trial_record.keep(state, tried())
    (state / "leases.json").write_text(json.dumps({"v": 1, "boot": boot, "facts": facts}))
    command = [sys.executable, "-m", "cadenza.sidecar.agent", "--config", str(folder / "cadenza.toml")]
    with (folder / "agent.log").open("ab") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            until(place.exists, "an answer of the agent")
            yield place
        finally:
            process.terminate()


def tried() -> Any:
    """Return the record of a trial of the driver; on the simulated GPU, whose driver has no trial, of a good one."""
    import pynvml  # noqa: PLC0415

    from cadenza.sidecar.agent.driver import driver_trial, trial_record  # noqa: PLC0415

    if SIMULATED:
        return trial_record.Record(driver_version())
    pynvml.nvmlInit()
    record = driver_trial.run(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0)), driver_version())
    if record.failed:
        raise NotRunError(record.failed)
    return record


def until(condition: Callable[[], object], what: str) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        require(time.monotonic() < deadline, f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(POLL_S)


class Alternation:
    """Two jobs that have taken turns, and the losses of the same job alone."""

    def __init__(self, folder: Path, role: str, gpus: Sequence[int] = (0,)) -> None:
        folder.mkdir()
        self._folder, self._role, self._gpus = folder, role, gpus
        self._devices = nvml_devices()
        self.jobs: list[Job] = []

    def run(self, row: Figures) -> None:
        """Let the jobs take turns, and see that they never trained at once."""
        if os.geteuid():
            raise NotRunError("needs root, as only root registers jobs with an agent")
        plain = self._role == "plain"
        try:
            for name in ("msgspec", "zmq", *(("cuda.bindings", "pynvml") if plain else ())):
                importlib.import_module(name)
        except ImportError as error:
            raise NotRunError(f"the agent needs msgspec and pyzmq, its driver path the extra driver: {error}") from None
        with agent(self._folder, plain=plain) as place:
            try:
                self.jobs = [self._start(number, place) for number in (1, 2)]
                until(self._have_turned, f"{TURNS} turns of each job: {self._log()}")
            finally:
                for job in self.jobs:
                    job.process.kill()
                    job.process.wait()
        row |= {"steps": sum(len(job.rows) for job in self.jobs), "turns": sum(job.turns for job in self.jobs)}
        if plain:  # a step that was stopped ends after steps of the other: count how often they take over
            gaps = self._gaps()
            row |= {"switches": len(gaps), "median_s": statistics.median(gaps)}
            require(len(gaps) <= row["turns"] + 2, "both trained at once")
            return
        for (_, end), (start, _) in itertools.pairwise(self._trained()):
            require(start >= end - 1e-3, "both trained at once")

    def _start(self, number: int, place: Path) -> Job:
        out = self._folder / f"job{number}"
        variables = {"SLURM_JOB_ID": str(number), wire.SOCKET_ENV: str(place)}
        command = registered(place, number, self._gpus, *self.command(out), granted=self._role == "plain")
        return Job(out, subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.DEVNULL))

    def command(self, out: Path, *words: str) -> list[str]:
        """Return the command of a job."""
        return [sys.executable, __file__, self._role, str(out), *words]

    def _have_turned(self) -> bool:
        for job in self.jobs:
            job.read()
            require(job.process.poll() is None, f"a job has ended with {job.process.returncode}: {self._log()}")
        for gpu in self._devices:
            for pid, nbytes in (gpu.processes() or {}).items():
                job = next((one for one in self.jobs if pid in one.pids and one.rows), None)
                if job is not None and nbytes is not None:
                    job.fewest_bytes = nbytes if job.fewest_bytes is None else min(job.fewest_bytes, nbytes)
        return all(job.turns >= TURNS for job in self.jobs)

    def _log(self) -> str:
        path = self._folder / "agent.log"
        return path.read_text()[-300:] if path.exists() else ""

    def _trained(self) -> list[tuple[float, float]]:
        """Return the stretches from one boundary to the next in which either job trained, by time."""
        pairs = (pair for job in self.jobs for pair in itertools.pairwise(job.rows))
        return sorted((first[1], second[0]) for first, second in pairs)

    def finished(self) -> Sequence[Job]:
        """Return the jobs; raise NotRunError unless they have taken their turns."""
        if not self.jobs or any(job.turns < TURNS for job in self.jobs):
            raise NotRunError("the jobs have not taken their turns")
        return self.jobs

    @functools.cached_property
    def _alone(self) -> Job:
        """The same job without another."""
        steps, out = max(len(job.rows) for job in self.finished()), self._folder / "alone"
        command = self.command(out, str(steps))
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            require(process.wait() == 0, "the job alone has failed")
        job = Job(out, process)
        job.read()
        return job

    def same(self, row: Figures) -> None:
        """Compare the losses with those of the job alone."""
        losses = [loss for _, _, loss in self._alone.rows]
        row["steps"] = len(losses)
        for job in self.jobs:
            require([loss for _, _, loss in job.rows] == losses[: len(job.rows)], "the losses differ")

    def left(self, row: Figures) -> None:
        """Compare NVML's bytes of a job while it waited with those of a process that has multiplied two matrices.

        The figure of the job alone, once it has trained and freed all it can, stands next to them: loaded kernels stay.
        """
        jobs = self.finished()
        row |= {"context_MiB": self._alone.context / 2**20, "freed_MiB": self._alone.freed / 2**20}
        for number, job in enumerate(jobs, 1):
            if job.fewest_bytes is None:
                raise NotRunError("NVML lists no process of the jobs")
            row |= {f"job{number}_MiB": job.fewest_bytes / 2**20}
            stays = job.fewest_bytes - job.context
            require(stays <= KEPT_BYTES, f"{stays >> 20} MiB of job {number} stay, over {KEPT_BYTES >> 20}")

    def switch(self, row: Figures) -> None:
        """Take the time from the last step of one job to the first of the other."""
        self.finished()
        gaps = self._gaps()
        row |= {
            "switches": len(gaps),
            "median_s": statistics.median(gaps),
            "of_a_60_s_slice": statistics.median(gaps) / 60,
        }
        require(statistics.median(gaps) <= SWITCH_S, f"over {SWITCH_S:g} s")

    def _gaps(self) -> list[float]:
        """Return the seconds between the last step of one job and the first of the other."""
        stretches = sorted((first[1], second[0], job.out.name) for job in self.jobs
                           for first, second in itertools.pairwise(job.rows))  # fmt: skip
        return [later[0] - before[1] for before, later in itertools.pairwise(stretches) if before[2] != later[2]]

    def overhead(self, row: Figures) -> None:
        """Compare the boundaries at which no job yields with the training between them."""
        boundaries = sum(end - began for job in self.finished() for began, end, _ in job.rows if end - began <= AWAY_S)
        trained = sum(end - start for start, end in self._trained())
        row |= {
            "ratio": boundaries / trained,
            "boundary_us": 1e6 * boundaries / sum(len(job.rows) for job in self.jobs),
        }
        require(row["ratio"] <= OVERHEAD, f"over {OVERHEAD:.0%} of an iteration")


def main(*wanted: str) -> None:
    """Run rows."""
    with tempfile.TemporaryDirectory() as folder:
        turns, plain = Alternation(Path(folder) / "job", "job"), Alternation(Path(folder) / "plain", "plain")
        groups: tuple[dict[str, Callable[[Figures], None]], ...] = (
            {
                "E two processes alternate on one GPU": turns.run,
                "E both compute what they compute alone": turns.same,
                "E the GPU is free of the one that waits": turns.left,
                "E seconds from one job to the other": turns.switch,
                "E overhead of the client an iteration": turns.overhead,
            },
            {
                "F two scripts without Cadenza alternate": plain.run,
                "F both scripts compute what they compute alone": plain.same,
            },
        )
        for group in groups:
            first, needed = next(iter(group)), not set(group).isdisjoint(wanted)
            for name, look in group.items():
                if name in wanted or (needed and name == first):
                    check(name, look)


if __name__ == "__main__":
    train(*sys.argv[1:]) if sys.argv[1] in {"job", "plain"} else main(*sys.argv[2:])
