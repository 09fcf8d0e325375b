"""Looks at a cluster through Slurm's own commands that only read, each added to a file of the user's."""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.text import printable
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.errors import SlurmUnavailable
from cadenza.slurm_plugin.gateway.slurm_gateway import json_of, slurm_config
from cadenza.slurm_plugin.history.cluster_nodes import read_hosts, with_lanes
from cadenza.slurm_plugin.history.job_records import JobRecords
from cadenza.slurm_plugin.history.queue_answer import read_queue
from cadenza.slurm_plugin.simulations import watch_record
from cadenza.slurm_plugin.simulations.first_decision import site_of
from cadenza.slurm_plugin.simulations.runs import Plan, ask_site, run_plan
from cadenza.slurm_plugin.simulations.watch_view import Look, WatchView, partitions_of, remarks, totals, view
from cadenza.slurm_plugin.simulations.whatif_output import judged, page

TIMEOUT_S = 60.0
QUEUE = ("squeue", "--all", "--states=all")
NODES = ("scontrol", "--all", "show", "node")
"""Also those of partitions that are hidden, or are for other groups: else neither they nor their GPUs are there."""


class Watch:
    """The watch of one cluster, or of one of its partitions; what it knows is in its file."""

    def __init__(self, partition: str | None, state: Path | None) -> None:
        """Open the file; raise InputError for one that is not ours, and an error of the gateway without Slurm."""
        self.partition = partition
        self.cluster = printable(slurm_config().get("ClusterName", "cluster"))
        name = re.sub(r"[^\w.-]", "_", "-".join(filter(None, ("watch", self.cluster, partition))))
        home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        self.path = state or home / "cadenza" / f"{name}.json"
        self._nodes = ""
        """The last answer on the nodes."""
        self._record: watch_record.WatchRecord | None = None
        self._last: WatchView | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other watches from the file; raise InputError while one has it."""
        with ExitStack() as stack:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(self.path.with_name(self.path.name + ".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._record = self._read()
            except BlockingIOError:
                raise InputError(f"{self.path}: another cadenza watch writes it; name another with --state") from None
            except OSError as error:
                raise InputError(f"{error.filename or self.path}: {error.strerror or error}") from None
            yield

    def looks(self, interval_s: float) -> Iterator[WatchView]:
        """Yield look after look; while Slurm does not answer, the last one with a note."""
        never = threading.Event()
        while True:
            try:
                yield self.look()
            except SlurmUnavailable as error:
                if self._last is None:
                    raise
                yield msgspec.structs.replace(self._last, notes=(f"Slurm does not answer: {error}", *self._last.notes))
            never.wait(interval_s)

    def look(self) -> WatchView:
        """Ask Slurm, add the answers to the file, and return the view."""
        # 1. Slurm's answers.
        config, queue, self._nodes = slurm_config(), json_of(QUEUE, TIMEOUT_S), json_of(NODES, TIMEOUT_S)
        hosts = read_hosts(self._nodes, "scontrol", self.partition)
        answer = read_queue(queue, "squeue", hosts.site)
        jobs = [(job, not hosts.partitions.isdisjoint(partitions_of(job))) for job in answer.jobs]
        here = tuple(job for job, ours in jobs if ours or any(name in hosts.host_of for name, _ in job.placement))
        now_s = SystemClock().now()
        notes = (*hosts.notes, *filter(None, (answer.note,)))
        look = Look(
            now_s, self.cluster, printable(config.get("PrivateData", "none")), hosts, here, site_of(config), notes
        )
        # 2. The file.
        before = self._record or watch_record.begin(self.cluster, self.partition, now_s)
        self._record = watch_record.add(before, now_s, [job for job, ours in jobs if ours], look.idle_waiting)
        self._write()
        # 3. The view.
        self._last = view(look, self._record)
        return self._last

    def write_page(self, file: Path, *, quiet: bool) -> None:
        """Write the page of a what-if of the runs that ended; raise InputError without any. A look comes first."""
        record, last = self._record, self._last
        if record is None or last is None or not record.runs:
            raise InputError(f"{self.path}: no job with GPUs has ended, so no page yet; let `cadenza watch` run")
        given = {"--partition": self.partition, "--state": self.path, "--html": file}
        plan = Plan(
            site=ask_site(), partition=self.partition, quiet=quiet, command="watch",
            remarks=remarks(totals(record), last.notes),
            arguments=tuple(f"{name}={value}" for name, value in given.items() if value is not None),
        )  # fmt: skip
        hosts = read_hosts(self._nodes, "scontrol", self.partition)
        nodes = with_lanes(hosts.nodes, plan.lanes)
        found = run_plan(
            plan,
            JobRecords(tuple(run.record for run in record.runs), Counter()),
            nodes,
            str(self.path),
            features=hosts.features,
        )
        try:
            file.write_text(page(found, *judged(found)), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--html: {str(file)!r} cannot be written: {error.strerror}") from None

    # --- The file ----------------------------------------------------------------------------------------

    def _read(self) -> watch_record.WatchRecord | None:
        if not self.path.exists():
            return None
        if self.path.stat().st_size > watch_record.MAX_BYTES:
            raise InputError(f"{self.path}: larger than {watch_record.MAX_BYTES:,} bytes; is it from cadenza watch?")
        record = watch_record.decode(self.path.read_bytes(), str(self.path))
        for key, there, here in (
            ("cluster", record.cluster, self.cluster), ("partition", record.partition, self.partition),
        ):  # fmt: skip
            if there != here:
                raise InputError(f"{self.path}: {key}: {there!r} was watched, not {here!r}; name another with --state")
        return record

    def _write(self) -> None:
        if self._record is None:
            return
        new = self.path.with_name(self.path.name + ".new")
        try:
            new.touch(0o600)
            new.write_bytes(watch_record.encode(self._record))
            new.replace(self.path)
        except OSError as error:
            raise InputError(f"{new}: cannot be written: {error.strerror}") from None
