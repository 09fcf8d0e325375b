"""Slurm through its own commands: ``squeue`` and ``scontrol`` with ``--json`` to read, ``scontrol`` to act."""

from __future__ import annotations

import json
import logging
import os
import pwd
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.policies.core.text import printable
from cadenza.slurm_plugin.errors import SlurmUnavailable
from cadenza.slurm_plugin.gateway.commands import Refusal, command, json_answer, json_format
from cadenza.slurm_plugin.gateway.comment import KEY
from cadenza.slurm_plugin.gateway.json_reader import JsonReader
from cadenza.slurm_plugin.gateway.slurm_gateway import parse
from cadenza.slurm_plugin.gateway.slurm_json import (
    SHARING,
    NotSlurms,
    Refused,
    read_jobs,
    read_nodes,
    read_reservations,
)
from cadenza.slurm_plugin.gateway.supervisor import result_of
from cadenza.slurm_plugin.gateway.verbs import Verbs

log = logging.getLogger(__name__)

Reader: TypeAlias = Callable[[bytes], tuple[list[dict[str, Any]], list[Refused]]]

NO_JOB, NO_NODE = 2017, 2018
"""Slurm's numbers for a job and a node that it does not know; see slurm_errno.h."""
COLUMNS = 2
TEXT_COLUMNS = {
    "JobId": 16, "State": 24, "RestartCnt": 16, "PriorityLong": 16, "ArrayJobId": 16, "ArrayTaskId": 64,
    "ReqNodes": 4096,
}  # fmt: skip
"""Columns of ``squeue --Format`` with their widths, which the releases have in common."""
OPTIONS: Mapping[str, str] = {
    "required_nodes": "ReqNodeList", "memory_per_node": "MinMemoryNode", "cpus_per_task": "CPUsPerTask",
    "min_cpus_per_node": "NumCPUs", "state": "State", "reason": "Reason",
}  # fmt: skip
"""Names of scontrol for the names of pyslurm."""


class Record:
    """A job or node of Slurm's JSON, its fields as attributes; a job has the verbs too."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.__dict__ = fields

    def __getattr__(self, name: str) -> Any:  # only for what is not there
        raise AttributeError(name)

    @property
    def task(self) -> str:
        """The name of a job for scontrol; of the rest of an array that waits, the next task's."""
        if not self.array_id:
            return str(self.id)
        # The number of an array's last task is the array's own, by which scontrol would change every task.
        waiting = re.match(r"\d+", self.array_tasks_waiting or "")
        return f"{self.array_id}_{waiting[0] if waiting else self.array_task_id or 0}"

    @property
    def tasks(self) -> str:
        """The name of a job for scontrol; of the rest of an array that waits, of all its tasks."""
        return str(self.id) if self.array_tasks_waiting else self.task

    def suspend(self) -> None:
        """Suspend the job."""
        command("scontrol", "suspend", self.task)

    def unsuspend(self) -> None:
        """Resume the job."""
        command("scontrol", "resume", self.task)

    def requeue(self, *, hold: bool) -> None:
        """Requeue the job, with ``hold`` into held state."""
        # One step for requeue and hold: between two of them Slurm could start the job again.
        command("scontrol", "requeuehold" if hold else "requeue", self.task)


class SlurmCommands:
    """Slurm through its commands."""

    error: type[Exception] = Refusal

    def __init__(self, reader: JsonReader | None = None) -> None:
        """``reader``: reads the lists of jobs and nodes in a process of its own; None: they are read here."""
        self._reader = reader
        self._reported: set[Refused] = set()
        self._sharing: dict[tuple[int, int, str], str] = {}
        """The way in which jobs share their nodes, where Slurm's JSON does not tell it."""

    def ping(self) -> dict[str, Any]:
        """Ping the primary slurmctld."""
        try:
            first = json.loads(json_answer("scontrol", "ping"))["pings"][0]
            latency_ms = float(first["latency"]) / 1000
            return {"host": str(first["hostname"]), "responding": first["responding"] is True, "latency_ms": latency_ms}
        except (ValueError, LookupError, TypeError, RecursionError):
            raise SlurmUnavailable("scontrol ping: its JSON cannot be read") from None

    def jobs(self) -> Iterable[Any]:
        """Return all jobs."""
        # Not by ``scontrol show jobs --json``: without slurmctld it shows no job, and calls that a success.
        # Without --states=all squeue leaves finished jobs out, also one that a killed slurmctld took for failed.
        jobs = self._list("jobs", read_jobs, "squeue", "--all", "--states=all")
        self._learn_sharing([job for job in jobs if job.resource_sharing is None and KEY in job.comment])
        return jobs

    def _learn_sharing(self, jobs: list[Record]) -> None:
        """Ask how jobs that may have opted in share their nodes, once for each state of theirs.

        From v0.0.45 on Slurm's JSON has neither ``shared`` nor what is to come in its place; squeue has a column.
        """
        keys = {(job.id, job.requeue_count, job.state): job for job in jobs}
        self._sharing = {key: word for key, word in self._sharing.items() if key in keys}
        missing = sorted(keys.keys() - self._sharing.keys())
        if missing:
            names = ",".join(str(number) for number, _, _ in missing)
            words = ("squeue", "--all", "--states=all", "--noheader", f"--jobs={names}")
            try:
                lines = command(*words, "--Format=JobID:24,Exclusive:24").splitlines()
            except Refusal as error:
                log.warning("whether jobs share their nodes is not known: %s", printable(str(error)))
            else:
                told = dict(line.split() for line in lines if len(line.split()) == COLUMNS)
                self._sharing |= {key: SHARING.get(told.get(str(key[0]), "").lower(), "OK") for key in missing}
        for key, job in keys.items():
            if (word := self._sharing.get(key)) is not None:
                job.__dict__ = {**vars(job), "resource_sharing": word}

    def nodes(self) -> Iterable[Any]:
        """Return all nodes."""
        # Without --all an ordinary user sees no nodes of partitions that are hidden or closed to that user's groups.
        return self._list("nodes", read_nodes, "scontrol", "--all", "show", "nodes")

    def reservations(self) -> list[dict[str, Any]]:
        """Return all reservations."""
        found = self._records(read_reservations, "scontrol", "--all", "show", "reservations")
        return [vars(one) for one in found]

    def started_s(self) -> float:
        """Return when slurmctld started."""
        try:
            return float(parse(command("scontrol", "show", "config"))["BOOT_TIME"])
        except (ValueError, LookupError):
            raise SlurmUnavailable("scontrol show config: there is no BOOT_TIME") from None

    def job_fields(self, job: Any) -> dict[str, Any]:
        """Return a job; the same object as long as it does not change."""
        fields: dict[str, Any] = vars(job)
        return fields

    def node_fields(self, node: Any) -> dict[str, Any]:
        """Return a node."""
        fields: dict[str, Any] = vars(node)
        return fields

    def job(self, number: int) -> Any:
        """Return one job."""
        # The number of an array's last task is the array's own as well, for which squeue lists every task.
        jobs = self._records(read_jobs, "squeue", "--all", "--states=all", f"--jobs={number}")
        return next((job for job in jobs if job.id == number), None) or _unknown("job", str(number), NO_JOB)

    def node(self, name: str) -> Any:
        """Return one node."""
        nodes = self._records(read_nodes, "scontrol", "--all", "show", "node", name)
        return next((node for node in nodes if node.name == name), None) or _unknown("node", name, NO_NODE)

    def name(self, job: Any) -> str:
        """Return a job's name for scontrol."""
        return str(job.task)

    def change_job(self, job: Any, changes: Mapping[str, Any]) -> None:
        """Change a job, of the rest of an array its next task; a release alone is one of all tasks that wait."""
        first = {name: value for name, value in changes.items() if name in OPTIONS}
        start = ("StartTime=now",) if "begin_time" in changes else ()
        name = job.task if first else job.tasks
        # The change comes before the release, or Slurm could start the job as it was.
        if first or start:
            update(f"JobId={job.task}", first, *start)
        # scontrol update sets a fixed priority only. A release lets Slurm compute the priority again.
        if "priority" in changes:
            command("scontrol", "release", name)

    def change_node(self, name: str, changes: Mapping[str, str]) -> None:
        """Change a node."""
        update(f"NodeName={name}", changes)

    def _list(self, key: str, read: Reader, *words: str) -> list[Record]:
        return self._records(read, *words) if self._reader is None else self._told(self._reader.read(key, words), words)

    def _records(self, read: Reader, *words: str) -> list[Record]:
        """Return the records of an answer."""
        try:
            return self._told(read(json_answer(*words)), words)
        except NotSlurms as error:
            raise SlurmUnavailable(f"{' '.join(words)}: {error}") from None

    def _told(self, answer: tuple[list[dict[str, Any]], list[Refused]], words: Sequence[str]) -> list[Record]:
        """Return records; those that cannot be read are logged once."""
        fields, refused = answer
        for problem in refused:
            if problem not in self._reported:
                log.warning("%s: left out: %s", words[0], printable(str(problem)))
        self._reported = set(refused)
        return [Record(one) for one in fields]


class TextCommands(SlurmCommands):
    """Slurm through its commands where none of its versions of JSON is read: as much as a release of all jobs takes.

    Each column is of Slurm's own making, so that no text of a user can stand for another one.
    """

    def jobs(self) -> Iterable[Any]:
        """Return all jobs with their states and pins; nothing else of them is known."""
        return self._rows()

    def job(self, number: int) -> Any:
        """Return one job."""
        jobs = self._rows(f"--jobs={number}")
        return next((job for job in jobs if job.id == number), None) or _unknown("job", str(number), NO_JOB)

    def nodes(self) -> Iterable[Any]:
        """Return no node."""
        return []

    def reservations(self) -> list[dict[str, Any]]:
        """Return no reservation."""
        return []

    def _rows(self, *words: str) -> list[Record]:
        columns = ",".join(f"{name}:{width}" for name, width in TEXT_COLUMNS.items())
        text = command("squeue", "--all", "--states=all", "--noheader", *words, f"--Format={columns}")
        return [Record(text_fields(line)) for line in text.splitlines() if line.strip()]


def text_fields(line: str) -> dict[str, Any]:
    """Return a job of a line of ``TEXT_COLUMNS``, under the names of pyslurm's properties."""
    cells, at = {}, 0
    for name, width in TEXT_COLUMNS.items():
        cells[name], at = line[at : at + width].strip(), at + width
    task = cells["ArrayTaskId"]
    array = "" if task in ("", "N/A") else cells["ArrayJobId"]
    values = {
        "job_id": int(cells["JobId"]), "restart_cnt": int(cells["RestartCnt"]), "job_state": [cells["State"]],
        "priority": _number(cells["PriorityLong"]), "required_nodes": cells["ReqNodes"],
        "array_job_id": _number(array), "array_task_id": _number(task if task.isdecimal() else ""),
        "array_task_string": "" if task.isdecimal() or not array else task,
    }  # fmt: skip
    jobs, refused = read_jobs(json.dumps({"jobs": [values]}))
    if refused:
        raise SlurmUnavailable(f"squeue --Format: {refused[0]}")
    return jobs[0]


def _number(text: str) -> dict[str, Any]:
    return {"set": text.isdecimal(), "number": int(text) if text.isdecimal() else 0}


def update(subject: str, changes: Mapping[str, Any], *words: str) -> None:
    """Change what ``subject`` names, by names of pyslurm."""
    values = {OPTIONS[name]: ",".join(value) if isinstance(value, list) else value for name, value in changes.items()}
    command("scontrol", "update", subject, *(f"{name}={value}" for name, value in values.items()), *words)


def _unknown(kind: str, name: str, errno: int) -> Record:
    raise Refusal(f"Slurm does not know {kind} {name}", errno)


def release_of_commands() -> str:
    """Return the release of Slurm's commands; raise EnvironmentLacks without them."""
    try:
        return command("scontrol", "--version").split()[-1]
    except (Refusal, IndexError) as error:
        raise EnvironmentLacks(f"scontrol --version: {error}") from None


class JsonSource:
    """Answers the gateway's requests by Slurm's commands."""

    def __init__(self, reason: str = "", commands: SlurmCommands | None = None, *, apart: bool = False) -> None:
        """``apart``: read long lists in a process of its own, as who reads again and again does."""
        self._reader = JsonReader() if apart else None
        self._verbs = Verbs(commands or SlurmCommands(self._reader))
        self._reason = reason
        """The cause for which pyslurm is not the source."""

    def ask(self, description: str, op: str, **arguments: Any) -> Any:
        """Return the result of one request, or raise the GatewayError that names who must act."""
        return result_of(description, self._verbs.answer({"op": op, **arguments}), node="node" in arguments)

    def greeting(self) -> dict[str, Any]:
        """Return the format, the release of Slurm's commands and our user; EnvironmentLacks without the commands."""
        release = release_of_commands()
        try:
            version = json_format()
        except Refusal as error:
            raise SlurmUnavailable(f"scontrol ping --json=list: {error}") from None
        user = pwd.getpwuid(os.geteuid()).pw_name
        return {"json": version, "scontrol": release, "user": user, "reason": self._reason}

    @property
    def waited_s(self) -> float | None:
        """Time for which its commands have waited for Slurm; None if it was not measured."""
        return self._reader.waited_s if self._reader is not None else None

    def close(self) -> None:
        """End the reader's process."""
        if self._reader is not None:
            self._reader.close()
