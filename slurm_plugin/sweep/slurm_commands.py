"""The user's own Slurm commands; no other module of this package starts a process."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cadenza.policies.core.text import printable
from cadenza.slurm_plugin.errors import SlurmUnavailable, SubmitError

COMMAND_TIMEOUT_S = 60.0
TAIL_BYTES, LAST_LINES, MAX_REASON = 4000, 3, 600
KEY = "cadenza"
BEHIND = "behind"
"""Key of the comment that marks a job whose priority the sweep has lowered by one."""
OVER = frozenset(
    {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "REVOKED", "TIMEOUT",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Queued:
    """One of the sweep's jobs in Slurm's queue."""

    job: int
    name: str
    state: str
    comment: str


class Written(NamedTuple):
    """The jobs whose comment was replaced, and those that have another one than was seen."""

    done: frozenset[int]
    lost: frozenset[int]


class Slurm:
    """Run sbatch, squeue, sacct, scancel and scontrol as the calling user."""

    def submit(self, words: Sequence[str], name: str, comment: str, env: Mapping[str, str], folder: Path) -> int:
        """Submit from ``folder`` and return the job's id; raise SubmitError with sbatch's own message."""
        done = _run(
            ["sbatch", "--parsable", f"--job-name={name}", f"--comment={comment}", *words],
            env={**os.environ, **env},
            cwd=folder,
        )
        try:
            if done.returncode == 0:
                # With several clusters --parsable adds the cluster's name behind a semicolon (sbatch(1)).
                return int(done.stdout.strip().splitlines()[-1].split(";")[0])
        except (ValueError, IndexError):
            pass
        raise SubmitError((done.stderr or done.stdout).strip() or f"sbatch ended with exit code {done.returncode}")

    def queue(self, prefix: str) -> list[Queued]:
        """Return the user's jobs whose name begins with ``prefix``, including recently ended ones."""
        # slurmctld knows ended jobs for MinJobAge, and squeue shows them with --states=all only.
        done = _checked(["squeue", "--me", "--noheader", "--states=all", "--format=%i|%j|%T|%k"])
        rows = [line.split("|", 3) for line in done.splitlines() if line.count("|") >= 3]  # noqa: PLR2004
        return [
            Queued(int(job), name, state, comment)
            for job, name, state, comment in rows
            if name.startswith(prefix) and job.isdigit()
        ]

    def final_states(self, jobs: Sequence[int]) -> dict[int, str]:
        """Return accounting's states of jobs that have left the queue; empty without accounting."""
        if not jobs:
            return {}
        try:
            done = _run(["sacct", "-n", "-X", "-P", "-o", "JobIDRaw,State", "-j", ",".join(map(str, jobs))])
        except SlurmUnavailable:
            return {}
        rows = [line.split("|") for line in done.stdout.splitlines()] if done.returncode == 0 else []
        # sacct writes "CANCELLED by UID".
        return {int(row[0]): row[1].split(" ")[0] for row in rows if len(row) > 1 and row[0].isdigit()}

    def failure(self, job: int) -> str:
        """Return the exit code of a job that has just failed, its log's name, and the last lines that it wrote there.

        Slurm forgets a job after MinJobAge; then the text is empty.
        """
        try:
            facts = _run(["scontrol", "show", "job", str(job)]).stdout
        except SlurmUnavailable:
            return ""
        code, log = re.search(r"\bExitCode=(\d+):(\d+)", facts), re.search(r"^\s*StdOut=(.+)$", facts, re.MULTILINE)
        ended = "" if code is None else f"signal {code[2]}" if code[2] != "0" else f"exit code {code[1]}"
        said = "" if log is None else f"{Path(log[1]).name}: {_last_lines(Path(log[1]))}"
        return printable("; ".join(filter(None, (ended, said))), MAX_REASON)

    def cancel(self, jobs: Iterable[int]) -> None:
        """Cancel jobs; ended ones are ignored."""
        if names := sorted(map(str, jobs)):
            _checked(["scancel", "--quiet", *names])

    def set_comment(self, seen: Mapping[int, str], comment: str) -> Written:
        """Replace the comment of the jobs that still have the one that was seen; who changed it since has it stay.

        Slurm may refuse, as for an ended job; then no job counts as done.
        """
        done = _run(["squeue", "--noheader", "--format=%i|%k", "--jobs=" + ",".join(map(str, seen))])
        rows = (line.partition("|") for line in done.stdout.splitlines())
        now = {int(job): text for job, _, text in rows if job.isdigit()}
        lost = frozenset(job for job in seen.keys() & now.keys() if not _same(seen[job], now[job]))
        chosen = sorted(now.keys() & seen.keys() - lost)
        update = ["scontrol", "update", "JobId=" + ",".join(map(str, chosen)), f"Comment={comment}"]
        accepted = bool(chosen) and _run(update).returncode == 0
        return Written(frozenset(chosen) if accepted else frozenset(), lost)


def comment_of(sweep: str, *, share: bool) -> str:
    """Return the comment of a sweep's jobs at submission."""
    options = {KEY: {"v": 1, "share": True}} if share else {}
    return json.dumps({"sweep": sweep, **options}, separators=(",", ":"))


def is_behind(comment: str) -> bool:
    """Return True if the job's priority was lowered."""
    return bool((_object(comment) or {}).get(BEHIND))


def with_place(comment: str, *, behind: bool) -> str | None:
    """Return the comment with the priority lowered or restored; None if it need not or cannot change.

    >>> with_place('{"cadenza":{"v":1,"share":true}}', behind=True)
    '{"cadenza":{"v":1,"share":true,"priority":-1},"behind":true}'
    """
    values = _object(comment)
    if values is None or not isinstance(values.get(KEY), dict) or bool(values.get(BEHIND)) == behind:
        return None
    options = dict(values[KEY])
    options["priority"] = int(options.get("priority", 0)) + (-1 if behind else 1)
    rest = {key: value for key, value in values.items() if key != BEHIND}
    return json.dumps({**rest, KEY: options, **({BEHIND: True} if behind else {})}, separators=(",", ":"))


def _last_lines(log: Path) -> str:
    """Return the last lines of a job's own."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return str(error.strerror)
    own = [line.strip() for line in lines if line.strip() and not line.startswith(("srun:", "slurmstepd:"))]
    return " | ".join(own[-LAST_LINES:]) or "empty"


def _same(seen: str, now: str) -> bool:
    """Return whether two comments say the same: job_submit.lua changes the order of a comment's keys."""
    return seen == now or (_object(seen) is not None and _object(seen) == _object(now))


def _object(comment: str) -> dict[str, Any] | None:
    try:
        value = json.loads(comment)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _checked(words: Sequence[str]) -> str:
    done = _run(words)
    if done.returncode:
        raise SlurmUnavailable(f"{words[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def _run(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
            **options,
        )
    except FileNotFoundError:
        raise SlurmUnavailable(f"{words[0]} is missing: run this where jobs are submitted") from None
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(f"{words[0]} has not answered for {COMMAND_TIMEOUT_S:.0f} s") from None
