"""The controller of a sweep: submits, reads results, stops and prefers; writes each step down before it takes it."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.sweep.learning_curve import Trial, judge, put_behind, scored
from cadenza.sidecar import clock
from cadenza.slurm_plugin.errors import SlurmUnavailable, SubmitError
from cadenza.slurm_plugin.sweep.configs import Config, Study, check_config
from cadenza.slurm_plugin.sweep.journal import (
    Journal,
    Record,
    Reports,
    SweepState,
    TrialState,
    read_state,
    write_journal,
)
from cadenza.slurm_plugin.sweep.sbatch_arguments import check_words, fill
from cadenza.slurm_plugin.sweep.slurm_commands import OVER, Queued, Slurm, comment_of, is_behind, with_place
from cadenza.slurm_plugin.sweep.study_plan import Plan

REPORT_ENV = "CADENZA_SWEEP_REPORT"
CONFIG_ENV = "CADENZA_SWEEP_CONFIG"
HEAD = "sweep.json"
MAX_SUBMISSIONS_PER_TICK = 20
ENDINGS = {"COMPLETED": "done", "CANCELLED": "cancelled"}
"""End of a trial by Slurm's state; every other final state means ``failed``."""


class Head(msgspec.Struct, frozen=True):
    """The fixed facts about a sweep, kept in its directory."""

    id: str
    plan: Plan
    words: list[str]
    """Arguments of ``sbatch``, with placeholders."""
    folder: str
    """Working directory of the submissions."""
    study: Study | None = None


def read_head(directory: Path) -> Head:
    """Return the head of a sweep's directory; raise InputError for another directory."""
    path = directory / HEAD
    try:
        return msgspec.json.decode(path.read_bytes(), type=Head)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): is this the directory of a sweep?") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: {error}") from None


class Sweep:
    """One sweep under this process's control; after its end, by exit or crash, another process may continue."""

    def __init__(self, directory: Path, slurm: Slurm | None = None) -> None:
        self.directory = directory
        self.head = read_head(directory)
        self.plan = self.head.plan
        self._rule = self.plan.build()
        self._journal = Journal(directory)
        self.state = read_state(directory)
        self._reports = Reports(directory)
        self._slurm = slurm or Slurm()
        self._comments: dict[int, str] = {}
        self._judged = False
        """True once the rule has been applied to all results so far."""
        self._queue_read_at: float | None = None
        """Monotonic time of the last read of Slurm's queue."""
        self.problem: str | None = None
        self.notice = ""
        """A change that the last call of ``tick`` left undone, with the reason; else empty."""
        """Error of the last call to Slurm, or None."""
        self._read_reports(self.trials)

    @classmethod
    def create(
        cls,
        directory: Path,
        plan: Plan,
        words: Sequence[str],
        configs: Iterable[Mapping[str, Any]] = (),
        *,
        study: Study | None = None,
        slurm: Slurm | None = None,
    ) -> Self:
        """Create a sweep's directory and return the sweep; the first ``tick`` submits its first jobs.

        Raise InputError for a directory with a sweep, and for words or configurations that cannot be used.
        """
        listed = [check_config(config, f"configuration {number}") for number, config in enumerate(configs)]
        names = sorted({name for config in listed for name in config} | set(study.space if study else ()))
        check_words(words, names)
        plan.build()
        if (directory / HEAD).exists():
            raise InputError(f"{directory}: has a sweep already: `cadenza sweep run {directory}` continues it")
        try:
            (directory / "reports").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{directory}: cannot be created ({error.strerror})") from None
        head = Head(f"{plan.name}-{secrets.token_hex(2)}", plan, list(words), str(Path.cwd()), study)
        write_journal(directory, [_asked(number, config, None) for number, config in enumerate(listed)])
        draft = directory / f".{HEAD}.new"  # the sweep exists once its head does, complete
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(head)))
        draft.replace(directory / HEAD)
        return cls(directory, slurm)

    # --- Interface -----------------------------------------------------------------------------------

    @property
    def trials(self) -> list[TrialState]:
        """Return all trials in order of their numbers."""
        return list(self.state.trials.values())

    @property
    def live(self) -> list[TrialState]:
        """Return the trials that have not ended."""
        return [trial for trial in self.trials if not trial.ended]

    @property
    def over(self) -> bool:
        """Return True once all trials have ended."""
        return not self.live

    def best(self) -> TrialState | None:
        """Return the trial with the best value so far, or None."""
        return best_of(self.trials, self.plan)

    def ask(self, config: Mapping[str, Any], key: int | None = None) -> int:
        """Add a configuration for the next ``tick`` to submit; return its number. ``key`` is the caller's own."""
        number = len(self.state.trials)
        self._record(_asked(number, check_config(config, "configuration"), key))
        return number

    def tick(self) -> list[TrialState]:
        """Make one pass over the sweep and return the trials that ended in it.

        If Slurm does not answer, ``problem`` has its error and a later call catches up. Raise SlurmUnavailable if it
        has never answered this process.
        """
        # 1. New reports.
        before = {trial.number for trial in self.live}
        self._read_reports(self.live)
        self.problem, self.notice = None, ""
        try:
            # 2. Slurm's queue, when its next read is due.
            if self._queue_read_at is None or clock.monotonic() - self._queue_read_at >= self.plan.slurm_s:
                self._follow(self._slurm.queue(self._name("")))
                self._queue_read_at = clock.monotonic()
            # 3. Stop the trials that the rule or a reached target makes pointless.
            for number, reason in ({} if self._judged else self._losers()).items():
                self._stop(self.state.trials[number], reason)
            self._judged = True
            self._cancel([trial for trial in self.live if trial.stop_reason and trial.slurm != "cancelling"])
            # 4. The best first, and new jobs as the plan allows.
            self._set_priorities()
            self._submit_waiting()
        except SlurmUnavailable as error:
            if self._queue_read_at is None:
                raise
            self.problem = str(error)
        return [trial for trial in self.trials if trial.number in before and trial.ended]

    def finished(self) -> Iterator[TrialState]:
        """Yield trials as they end, until all have; the caller may add trials during the iteration."""
        while not self.over:
            yield from self.tick()
            if not self.over:
                clock.sleep(self.plan.poll_s)

    def stop(self, reason: str = "the sweep was stopped") -> None:
        """Cancel every job of the sweep; raise SlurmUnavailable when Slurm does not answer."""
        self._record({"kind": "closed"})
        self._follow(self._slurm.queue(self._name("")))
        for trial in self.live:
            self._stop(trial, reason)
        self._cancel(self.live)

    def close(self) -> None:
        """Let another process take over."""
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- Results ------------------------------------------------------------------------------------

    def _read_reports(self, trials: Iterable[TrialState]) -> None:
        """Read the new reports of jobs."""
        new = self._reports.read(trials)
        self._judged &= not new
        target = self.plan.target
        for trial, report in new:
            if self.state.target is None and target is not None and self.plan.better(report["value"], target):
                self._record({"kind": "target", "trial": trial.number, **report})

    def _losers(self) -> Mapping[int, str]:
        """Return the trials to stop with the reasons."""
        if self.state.target is not None:
            winner = self.state.target["trial"]
            spared = winner if self.plan.finish else None
            others = [trial.number for trial in self.live if trial.number != spared and not trial.stop_reason]
            return dict.fromkeys(others, f"configuration {winner} has reached the target")
        losers = judge(self._curves(), self._rule, self.plan.stop.first)
        return {number: reason for number, reason in losers.items() if not self.state.trials[number].stop_reason}

    def _curves(self) -> tuple[Trial, ...]:
        return scored([trial.curve() for trial in self.trials], self.plan.goal)

    # --- Slurm --------------------------------------------------------------------------------------

    def _follow(self, queue: Sequence[Queued]) -> None:
        """Update the trials from Slurm's queue."""
        by_name = {queued.name: queued for queued in queue}
        for trial in self.live:
            queued = by_name.get(self._name(trial.number))
            if trial.state == "submitting":  # an earlier controller was killed during the submission
                kind = {"kind": "new"} if queued is None else {"kind": "live", "job": queued.job}
                self._record({**kind, "trial": trial.number})
            if trial.state == "live" and queued is not None:
                trial.slurm, trial.behind = queued.state, is_behind(queued.comment)
                self._comments[trial.number] = queued.comment
                if queued.state in OVER:
                    self._end(trial, queued.state)
        lost = {t.job: t for t in self.live if t.state == "live" and t.job and self._name(t.number) not in by_name}
        states = self._slurm.final_states(list(lost))
        for job, trial in lost.items():
            self._end(trial, states.get(job, ""))

    def _end(self, trial: TrialState, slurm: str) -> None:
        """Record the end of a job, including its last reports."""
        self._read_reports(self.live)
        trial.slurm = slurm
        state = ENDINGS.get(slurm, "failed") if slurm else "gone"
        state = "stopped" if trial.stop_reason and state != "done" else state
        reason = self._slurm.failure(trial.job) if state == "failed" and trial.job is not None else ""
        self._record({"kind": state, "trial": trial.number, **({"reason": reason} if reason else {})})

    def _cancel(self, trials: Iterable[TrialState]) -> None:
        """Cancel jobs; trials that were never submitted end at once."""
        chosen = list(trials)
        self._slurm.cancel(trial.job for trial in chosen if trial.job is not None)
        for trial in chosen:
            if trial.job is not None:
                trial.slurm = "cancelling"
            elif trial.state == "new":
                self._record({"kind": "stopped", "trial": trial.number})

    def _stop(self, trial: TrialState, reason: str) -> None:
        self._record({"kind": "stop", "trial": trial.number, "reason": reason})

    def _set_priorities(self) -> None:
        """Lower the priority of all but the best live trials, and restore it when they become the best."""
        behind = put_behind(self._curves(), self.plan.top, self.plan.stop.first)
        wanted: dict[str, list[TrialState]] = defaultdict(list)
        for trial in self.live:
            comment = self._comments.get(trial.number)
            changed = with_place(comment, behind=trial.number in behind) if comment and not trial.stop_reason else None
            if changed is not None:
                wanted[changed].append(trial)
        for comment, trials in wanted.items():
            seen = {trial.job: self._comments[trial.number] for trial in trials if trial.job is not None}
            written = self._slurm.set_comment(seen, comment)
            for trial in trials:
                if trial.job in written.done:
                    self._comments[trial.number], trial.behind = comment, is_behind(comment)
                else:  # the next read of the queue has the valid comment
                    self._comments.pop(trial.number, None)
                if trial.job in written.lost:
                    self.notice = (
                        f"configuration {trial.number}: its comment was changed, so its priority stays for now"
                    )

    # --- Submission ---------------------------------------------------------------------------------

    def _submit_waiting(self) -> None:
        """Submit new trials, as many at a time as the plan allows."""
        if self.state.target is not None or self.state.closed:
            return
        room = self.plan.at_once or len(self.trials)
        in_slurm = sum(trial.state in ("submitting", "live") for trial in self.live)
        waiting = [trial for trial in self.live if trial.state == "new" and not trial.stop_reason]
        for trial in waiting[: max(0, min(room - in_slurm, MAX_SUBMISSIONS_PER_TICK))]:
            self._submit(trial)

    def _submit(self, trial: TrialState) -> None:
        self._record({"kind": "submitting", "trial": trial.number})
        reserved = {"number": trial.number, "sweep": self.head.id}
        env = {
            REPORT_ENV: str(self._reports.path(trial.number).resolve()),
            CONFIG_ENV: msgspec.json.encode(trial.config).decode(),
        }
        comment = comment_of(self.head.id, share=self.plan.share)
        words = fill(self.head.words, trial.config, reserved)
        try:
            job = self._slurm.submit(words, self._name(trial.number), comment, env, Path(self.head.folder))
        except SubmitError as error:
            self._record({"kind": "failed", "trial": trial.number, "reason": f"sbatch: {error}"})
        else:
            self._record({"kind": "live", "trial": trial.number, "job": job})

    def _name(self, number: int | str) -> str:
        """Return the job name of a trial; for "" the prefix of all names."""
        return f"{self.head.id}.{number}"

    def _record(self, record: Record) -> None:
        """Append a record to the journal and then apply it to the state."""
        stamped = {"time_s": clock.now(), **record}
        self._journal.append(stamped)
        self.state.apply(stamped)


def _asked(number: int, config: Config, key: int | None) -> Record:
    return {"kind": "asked", "time_s": clock.now(), "trial": number, "config": config, "key": key}


def best_of(trials: Iterable[TrialState], plan: Plan) -> TrialState | None:
    """Return the trial with the best value, or None without a finite value."""
    by_number = {trial.number: trial for trial in trials}
    ranked = scored([trial.curve() for trial in by_number.values() if trial.points], plan.goal)
    first = max(ranked, key=lambda trial: (trial.top, -trial.number), default=None)
    return by_number[first.number] if first is not None and first.top > float("-inf") else None


def load(directory: Path) -> tuple[Head, SweepState]:
    """Return head and state of a sweep from its directory, without taking control of it."""
    head, state = read_head(directory), read_state(directory)
    Reports(directory).read(state.trials.values())
    return head, state
