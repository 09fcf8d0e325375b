"""The sweep itself: submits, reads results, stops and favours by the plan, and notes all of it before it is done."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from cadenza.policies.sweep.learning_curve import Trial, judge, put_behind, scored
from cadenza.sidecar import clock
from cadenza.slurm_plugin.sweep.configs import Config, Study, check_config
from cadenza.slurm_plugin.sweep.errors import InputError, SlurmUnavailable, SubmitError
from cadenza.slurm_plugin.sweep.journal import Book, Journal, Record, Reports, TrialState, read_book, write_journal
from cadenza.slurm_plugin.sweep.sbatch_arguments import check_words, fill
from cadenza.slurm_plugin.sweep.slurm_commands import OVER, Queued, Slurm, comment_of, is_behind, with_place
from cadenza.slurm_plugin.sweep.study_plan import Plan

REPORT_ENV = "CADENZA_SWEEP_REPORT"
CONFIG_ENV = "CADENZA_SWEEP_CONFIG"
HEAD = "sweep.json"
AT_A_TIME = 20
"""Submissions between two looks at results."""
ENDINGS = {"COMPLETED": "done", "CANCELLED": "cancelled"}
"""How a job ended, by Slurm's state; any other that is over is ``failed``."""


class Head(msgspec.Struct, frozen=True):
    """What a sweep's directory says of it once and for all."""

    id: str
    plan: Plan
    words: list[str]
    """What follows ``sbatch``, with placeholders."""
    folder: str
    """Where jobs are submitted from."""
    study: Study | None = None


def read_head(directory: Path) -> Head:
    """Return what a sweep's directory says of it; raise InputError when it is none."""
    path = directory / HEAD
    try:
        return msgspec.json.decode(path.read_bytes(), type=Head)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): not the directory of a sweep?") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InputError(f"{path}: {error}") from None


class Sweep:
    """One sweep under this process's control; another process may go on once this one has ended, however it did."""

    def __init__(self, directory: Path, slurm: Slurm | None = None) -> None:
        self.directory = directory
        self.head = read_head(directory)
        self.plan = self.head.plan
        self._rule = self.plan.build()
        self._journal = Journal(directory)
        self.book = read_book(directory)
        self._reports = Reports(directory)
        self._slurm = slurm or Slurm()
        self._comments: dict[int, str] = {}
        self._judged = False
        """Whether the rule has seen all that there is."""
        self._asked_at: float | None = None
        """When Slurm was last asked, by the monotonic clock."""
        self.trouble = ""
        """Why Slurm could not be reached at the last try; "" when it could."""
        self._look(self.trials)

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
        """Make a sweep's directory and return the sweep; nothing is submitted before the first ``tick``.

        Raise InputError when the directory has a sweep already, or for words or configurations that cannot be.
        """
        listed = [check_config(config, f"configuration {number}") for number, config in enumerate(configs)]
        names = sorted({name for config in listed for name in config} | set(study.space if study else ()))
        check_words(words, names)
        plan.build()
        if (directory / HEAD).exists():
            raise InputError(f"{directory}: has a sweep already: `cadenza sweep resume {directory}`, or name another")
        try:
            (directory / "reports").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{directory}: cannot be made ({error.strerror})") from None
        head = Head(f"{plan.name}-{secrets.token_hex(2)}", plan, list(words), str(Path.cwd()), study)
        write_journal(directory, [_asked(number, config, None) for number, config in enumerate(listed)])
        draft = directory / f".{HEAD}.new"  # the sweep is there once its head is, with all that it was given
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(head)))
        draft.replace(directory / HEAD)
        return cls(directory, slurm)

    # --- What the caller sees -----------------------------------------------------------------------

    @property
    def trials(self) -> list[TrialState]:
        """Return all trials in order of their numbers."""
        return list(self.book.trials.values())

    @property
    def live(self) -> list[TrialState]:
        """Return the trials that have not ended."""
        return [trial for trial in self.trials if not trial.ended]

    @property
    def over(self) -> bool:
        """Whether nothing is left to do for the trials there are."""
        return not self.live

    def best(self) -> TrialState | None:
        """Return the trial with the best value reported so far; None before the first."""
        return best_of(self.trials, self.plan)

    def ask(self, config: Mapping[str, Any], key: int | None = None) -> int:
        """Add a configuration for the next ``tick`` to submit; return its number. ``key`` is the caller's own."""
        number = len(self.book.trials)
        self._note(_asked(number, check_config(config, "configuration"), key))
        return number

    def tick(self) -> list[TrialState]:
        """Do what is due now, and return the trials that have ended by it.

        Slurm may be away meanwhile: ``trouble`` says so, and what is due then is done at a later call. Raise
        SlurmUnavailable when it has never answered this process.
        """
        before = {trial.number for trial in self.live}
        self._look(self.live)
        self.trouble = ""
        try:
            self._look_at_slurm()
            self._judge()
            self._favour()
            self._submit_waiting()
        except SlurmUnavailable as error:
            if self._asked_at is None:
                raise
            self.trouble = str(error)
        return [trial for trial in self.trials if trial.number in before and trial.ended]

    def finished(self) -> Iterator[TrialState]:
        """Yield trials as they end, until all have; the caller may ask for further ones meanwhile."""
        while not self.over:
            yield from self.tick()
            if not self.over:
                clock.sleep(self.plan.poll_s)

    def stop(self, why: str = "the sweep was stopped") -> None:
        """Cancel every job of the sweep; raise SlurmUnavailable when Slurm does not answer."""
        self._note({"kind": "closed"})
        self._adopt(self._slurm.queue(self._name("")))
        for trial in self.live:
            self._stop(trial, why)
        self._cancel(self.live)

    def close(self) -> None:
        """Let another process take over."""
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- Results ------------------------------------------------------------------------------------

    def _look(self, trials: Iterable[TrialState]) -> None:
        """Read what jobs have reported."""
        new = self._reports.look(trials)
        self._judged &= not new
        for trial, report in new:
            if self.book.target is None and self._reaches(report["value"]):
                self._note({"kind": "target", "trial": trial.number, **report})

    def _reaches(self, value: float) -> bool:
        return self.plan.target is not None and self.plan.better(value, self.plan.target)

    def _judge(self) -> None:
        """Stop whom the rule, or a reached target, leaves without a purpose."""
        for number, why in ({} if self._judged else self._losers()).items():
            self._stop(self.book.trials[number], why)
        self._judged = True
        self._cancel([trial for trial in self.live if trial.why and trial.slurm != "cancelling"])

    def _losers(self) -> Mapping[int, str]:
        if self.book.target is not None:
            winner = self.book.target["trial"]
            spared = winner if self.plan.finish else None
            others = [trial.number for trial in self.live if trial.number != spared and not trial.why]
            return dict.fromkeys(others, f"configuration {winner} has reached the target")
        losers = judge(self._curves(), self._rule, self.plan.stop.first)
        return {number: why for number, why in losers.items() if not self.book.trials[number].why}

    def _curves(self) -> tuple[Trial, ...]:
        return scored([trial.curve() for trial in self.trials], self.plan.goal)

    # --- Slurm --------------------------------------------------------------------------------------

    def _look_at_slurm(self) -> None:
        """Ask Slurm which jobs have ended, when that is due."""
        due = self._asked_at is None or clock.monotonic() - self._asked_at >= self.plan.slurm_s
        if due:
            self._adopt(self._slurm.queue(self._name("")))
            self._asked_at = clock.monotonic()

    def _adopt(self, queue: Sequence[Queued]) -> None:
        """Bring the trials up to date with Slurm's queue."""
        by_name = {queued.name: queued for queued in queue}
        for trial in self.live:
            queued = by_name.get(self._name(trial.number))
            if trial.state == "submitting":
                self._find_again(trial, queued)
            if trial.state == "live" and queued is not None:
                self._seen(trial, queued)
        lost = {t.job: t for t in self.live if t.state == "live" and t.job and self._name(t.number) not in by_name}
        states = self._slurm.final_states(list(lost))
        for job, trial in lost.items():
            self._end(trial, states.get(job, ""))

    def _find_again(self, trial: TrialState, queued: Queued | None) -> None:
        """Settle a submission in which an earlier controller was killed."""
        if queued is None:
            self._note({"kind": "new", "trial": trial.number})
        else:
            self._note({"kind": "live", "trial": trial.number, "job": queued.job})

    def _seen(self, trial: TrialState, queued: Queued) -> None:
        trial.slurm, trial.behind = queued.state, is_behind(queued.comment)
        self._comments[trial.number] = queued.comment
        if queued.state in OVER:
            self._end(trial, queued.state)

    def _end(self, trial: TrialState, slurm: str) -> None:
        """Note how a job ended; what it reported last counts."""
        self._look(self.live)
        trial.slurm = slurm
        state = ENDINGS.get(slurm, "failed") if slurm else "gone"
        self._note({"kind": "stopped" if trial.why and state != "done" else state, "trial": trial.number})

    def _cancel(self, trials: Iterable[TrialState]) -> None:
        """Cancel jobs; what was never submitted ends by that."""
        found = list(trials)
        self._slurm.cancel(trial.job for trial in found if trial.job is not None)
        for trial in found:
            if trial.job is not None:
                trial.slurm = "cancelling"
            elif trial.state == "new":
                self._note({"kind": "stopped", "trial": trial.number})

    def _stop(self, trial: TrialState, why: str) -> None:
        self._note({"kind": "stop", "trial": trial.number, "why": why})

    def _favour(self) -> None:
        """Lower the priority of those that are to make way, and raise it again where they are not any more."""
        behind = put_behind(self._curves(), self.plan.top, self.plan.stop.first)
        wanted: dict[str, list[TrialState]] = defaultdict(list)
        for trial in self.live:
            comment = self._comments.get(trial.number)
            changed = with_place(comment, behind=trial.number in behind) if comment and not trial.why else None
            if changed is not None:
                wanted[changed].append(trial)
        for comment, trials in wanted.items():
            self._place(trials, comment)

    def _place(self, trials: Sequence[TrialState], comment: str) -> None:
        """Give jobs another comment; one that cannot have it is looked at again with the next queue."""
        fine = self._slurm.set_comment([trial.job for trial in trials if trial.job is not None], comment)
        for trial in trials:
            if fine:
                self._comments[trial.number], trial.behind = comment, is_behind(comment)
            else:
                self._comments.pop(trial.number, None)

    # --- Submission ---------------------------------------------------------------------------------

    def _submit_waiting(self) -> None:
        """Submit what has not been, as many at a time as the plan allows."""
        if self.book.target is not None or self.book.closed:
            return
        room = self.plan.at_once or len(self.trials)
        in_slurm = sum(trial.state in ("submitting", "live") for trial in self.live)
        waiting = [trial for trial in self.live if trial.state == "new" and not trial.why]
        for trial in waiting[: max(0, min(room - in_slurm, AT_A_TIME))]:
            self._submit(trial)

    def _submit(self, trial: TrialState) -> None:
        self._note({"kind": "submitting", "trial": trial.number})
        known = {"number": trial.number, "sweep": self.head.id}
        env = {
            REPORT_ENV: str(self._reports.path(trial.number).resolve()),
            CONFIG_ENV: msgspec.json.encode(trial.config).decode(),
        }
        comment = comment_of(self.head.id, share=self.plan.share)
        words = fill(self.head.words, trial.config, known)
        try:
            job = self._slurm.submit(words, self._name(trial.number), comment, env, Path(self.head.folder))
        except SubmitError as error:
            self._note({"kind": "failed", "trial": trial.number, "why": f"sbatch: {error}"})
        else:
            self._note({"kind": "live", "trial": trial.number, "job": job})

    def _name(self, number: int | str) -> str:
        """Return the job name of a trial; of "" what all names begin with."""
        return f"{self.head.id}.{number}"

    def _note(self, record: Record) -> None:
        """Write down what is about to be done, or was found; only then it counts."""
        stamped = {"time_s": clock.now(), **record}
        self._journal.append(stamped)
        self.book.apply(stamped)


def _asked(number: int, config: Config, key: int | None) -> Record:
    return {"kind": "asked", "time_s": clock.now(), "trial": number, "config": config, "key": key}


def best_of(trials: Iterable[TrialState], plan: Plan) -> TrialState | None:
    """Return the trial with the best value of all; None when nobody has reported one that is finite."""
    by_number = {trial.number: trial for trial in trials}
    ranked = scored([trial.curve() for trial in by_number.values() if trial.points], plan.goal)
    first = max(ranked, key=lambda trial: (trial.top, -trial.number), default=None)
    return by_number[first.number] if first is not None and first.top > float("-inf") else None


def load(directory: Path) -> tuple[Head, Book]:
    """Return a sweep as its directory has it, without control of it."""
    head, book = read_head(directory), read_book(directory)
    Reports(directory).look(book.trials.values())
    return head, book
