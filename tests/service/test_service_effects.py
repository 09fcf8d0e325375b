"""Effects of decisions: measured before and after, undone, replaced, and kept on record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from service_rig import job, node

from cadenza.policies.core.actions import Action, Migrate, Outcome, Pack, Resize, Tune, Unpack
from cadenza.policies.core.decision import Alone, Decision, Memory, SharingMemory
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Host, Job, JobKey, Lease, Share, StepRate
from cadenza.policies.core.move import Move, Over
from cadenza.policies.core.profile import Profile
from cadenza.policies.guard import GuardSettings
from cadenza.policies.round import run_round
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.orders import VERSION, Switched
from cadenza.slurm_plugin.service.accounting.effects import MAX_UNMEASURED_S, Effect
from cadenza.slurm_plugin.service.store.reader import StoreReader
from cadenza.slurm_plugin.service.store.writer import SqliteStore
from cadenza.slurm_plugin.views.job_sentences import effect_sentence

A, B = JobKey(1, 0), JobKey(2, 0)
FOUR, EIGHT = (Share("n1", 1, 4, 1000),), (Share("n1", 1, 8, 1000),)
PROFILE = Profile("res18", 0.5, cpus_per_gpu=(4.0, 8.0), memory_gb_per_gpu=(0.5,), throughput=((1.0,), (1.5,)))


class Rig:
    """Rounds 10 s apart over what a test says of the jobs, into one store."""

    def __init__(self, path: Path) -> None:
        self.path, self.now_s, self.ok = path, 1000.0, True
        self.store = SqliteStore(path, SystemClock())
        self.snapshot: ClusterSnapshot | None = None

    def read(self) -> ClusterSnapshot:
        assert self.snapshot is not None
        return self.snapshot

    def apply(self, _action: Action) -> Outcome:
        return Outcome(ok=self.ok, error="" if self.ok else "no")

    def round(self, *jobs: Job, actions: tuple[Action, ...] = (), memory: Memory | None = None, wait_s=10.0) -> None:
        self.now_s += wait_s
        self.snapshot = ClusterSnapshot(self.now_s, (node("n1"), node("n1-l1", 1)), jobs, (Host("n1", True),))
        decision = Decision(actions, memory or self.store.memory())
        rules = GuardSettings(enforce=True, partitions=frozenset({"gpu"}))
        run_round(self, SystemClock(), self.store, lambda _snapshot, _memory: decision, rules)

    def again(self) -> None:
        """Go on as a service that was killed and started."""
        self.store = SqliteStore(self.path, SystemClock())

    def effects(self, number: int | None = None) -> tuple[Effect, ...]:
        with StoreReader(self.path) as reader:
            return reader.effects(job=number)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "cadenza.db")


def trains(step: int, held_s: float, key: JobKey = A, **changes: object) -> Job:
    lease = Lease("held", (Gpu("n1", 0),), held_s, held_s, ready=True, iteration_s=0.9, step=step)
    return job(key.id, key=key, **{"lease": lease, "placement": FOUR, "profile": PROFILE, **changes})


def test_a_tune_is_measured_before_and_after(rig: Rig) -> None:
    rig.round(trains(1, 30.0))
    rig.round(trains(101, 80.0), actions=(Tune(A, EIGHT, "its profile says so"),))
    (found,) = rig.effects()
    assert (found.kind, found.verdict, found.after_s) == ("tune", "", None)
    assert found.before_s == pytest.approx(0.5)
    assert found.predicted == pytest.approx(1.5)
    rig.round(trains(110, 84.0, placement=EIGHT))
    rig.round(trains(120, 88.0, placement=EIGHT))
    assert rig.effects()[0].after_s is None
    rig.again()
    rig.round(trains(210, 124.0, placement=EIGHT))
    (found,) = rig.effects(1)
    assert (found.after_s, found.gain, found.verdict) == (pytest.approx(0.4), pytest.approx(1.25), "kept")
    rig.round(trains(510, 244.0, placement=EIGHT))
    rig.round(trains(9000, 9999.0, placement=EIGHT))
    assert rig.effects()[0].after_s == pytest.approx(0.4)


def test_a_tune_back_is_the_undoing_and_one_forth_replaces(rig: Rig) -> None:
    rig.round(trains(1, 30.0), actions=(Tune(A, EIGHT, "try more"),))
    rig.round(trains(50, 50.0, placement=EIGHT))
    rig.round(trains(150, 90.0, placement=EIGHT), actions=(Tune(A, FOUR, "it brought nothing"),))
    back, forth = rig.effects()
    assert (forth.verdict, forth.detail, forth.after_s) == ("undone", "it brought nothing", pytest.approx(0.4))
    assert back.verdict == ""
    rig.round(trains(160, 95.0), actions=(Tune(A, (Share("n1", 1, 6, 1000),), "another"),))
    assert [one.now for one in rig.effects()] == ["6 CPUs 1000 MB on n1", "8 CPUs 1000 MB on n1"]


def test_what_failed_changes_nothing_and_the_same_again_is_no_decision(rig: Rig) -> None:
    rig.ok = False
    rig.round(trains(1, 30.0), actions=(Tune(A, EIGHT, "x"),))
    rig.ok = True
    rig.round(trains(9, 30.0), actions=(Tune(A, FOUR, "x"),))
    assert rig.effects() == ()


def test_a_job_that_ends_or_stalls_leaves_the_verdict_open(rig: Rig) -> None:
    rig.round(trains(1, 30.0), trains(1, 30.0, B), actions=(Tune(A, EIGHT, "x"), Tune(B, EIGHT, "x")))
    rig.round(trains(2, 40.0, B, placement=EIGHT))
    stalls, ended = sorted(rig.effects(), key=lambda one: -one.job)
    assert (ended.verdict, ended.detail) == ("unknown", "the job ended before it was measured")
    assert stalls.verdict == ""
    rig.round(trains(3, 50.0, B, placement=EIGHT), wait_s=MAX_UNMEASURED_S + 1)
    assert "too few iterations" in rig.effects(2)[0].detail


def packed(*paces: tuple[float, int]) -> tuple[Job, ...]:
    found = []
    for (iteration_s, iterations), key, other in zip(paces, (A, B), (B, A), strict=True):
        one = trains(iterations, 50.0, key)
        pace = StepRate(iteration_s, iterations, 20.0, co_runners=(other,))
        found.append(replace(one, lease=replace(one.lease, pace=pace)))
    return tuple(found)


def test_a_pack_is_measured_as_it_is_judged_and_its_undoing_is_told(rig: Rig) -> None:
    memory = Memory(sharing=SharingMemory(alone=(Alone(A, 0.1), Alone(B, 0.2))))
    rig.round(trains(5, 9.0), trains(5, 9.0, B), actions=(Pack((B, A), "both leave it idle"),), memory=memory)
    assert [(one.job, one.before_s, one.now) for one in rig.effects()] == [
        (1, 0.1, "with job 2"),
        (2, 0.2, "with job 1"),
    ]
    rig.round(*packed((0.125, 4), (0.25, 4)))
    assert rig.effects(1)[0].after_s is None
    rig.round(*packed((0.125, 80), (0.25, 40)))
    for one in rig.effects():
        assert (one.verdict, one.gain) == ("kept", pytest.approx(1.6))
    rig.round(*packed((0.3, 160), (0.5, 80)), actions=(Unpack(B, "together they ran at 73% of turns"),))
    for one in rig.effects():
        assert (one.verdict, one.detail) == ("undone", "together they ran at 73% of turns")
        assert one.gain == pytest.approx(0.1 / 0.3 + 0.2 / 0.5)
    rig.round(*packed((0.3, 999), (0.5, 999)))
    assert rig.effects(1)[0].gain == pytest.approx(0.1 / 0.3 + 0.2 / 0.5)


def test_a_pack_whose_partner_ended_was_kept(rig: Rig) -> None:
    rig.round(trains(5, 9.0), trains(5, 9.0, B), actions=(Pack((B, A), "x"),))
    rig.round(*packed((0.125, 80), (0.25, 40)))
    rig.round(trains(99, 99.0))
    rig.round(trains(99, 99.0))
    assert {(one.verdict, one.ended_s is None) for one in rig.effects()} == {("kept", False)}


def move(outcome: str = "went to n2", *, resize: bool = True) -> Memory:
    ended = Over(1000.0, outcome)
    return Memory(moves=(Move(A, (Share("n2", 2, 0, 0),), "two GPUs are idle", ended, resize=resize),))


def test_a_resize_is_measured_in_the_next_incarnation(rig: Rig) -> None:
    grow = Resize(A, (Share("n2", 2, 0, 0),), "two GPUs are idle")
    rig.round(trains(1, 30.0))
    rig.round(trains(101, 80.0), actions=(grow,))
    rig.round(trains(101, 80.0))
    there = {"nodes": ("n2",), "gpus": 2, "placement": (Share("n2", 2, 8, 1000),)}
    rig.round(trains(105, 2.0, JobKey(1, 1), **there), memory=move())
    rig.round(trains(205, 27.0, JobKey(1, 1), **there), memory=move())
    (found,) = rig.effects()
    assert (found.was, found.now) == ("1 GPUs on n1", "2 GPUs on n2")
    assert (found.before_s, found.after_s, found.verdict) == (pytest.approx(0.5), pytest.approx(0.25), "kept")
    shrink = Resize(JobKey(1, 1), (Share("n1", 1, 0, 0),), "job 9 waits")
    rig.round(trains(300, 50.0, JobKey(1, 1), **there), actions=(shrink,))
    assert [(one.verdict, one.detail) for one in rig.effects()] == [("", ""), ("undone", "job 9 waits")]


def test_a_move_that_did_not_come_about_says_why(rig: Rig) -> None:
    rig.round(trains(1, 30.0), actions=(Migrate(A, (Share("n2", 1, 0, 0),), "away from a crowd"),))
    failed = move(outcome="not moved: its checkpoint failed", resize=False)
    rig.round(trains(9, 40.0), memory=failed)
    rig.round(trains(9, 50.0))
    assert [(one.verdict, one.detail) for one in rig.effects()] == [("undone", "not moved: its checkpoint failed")]


# --- The store's sums ---


def test_the_store_adds_up_hours_and_keeps_them_when_the_rounds_are_gone(rig: Rig) -> None:
    rig.now_s = 3590.0 - 10.0
    for held_s in (50.0, 60.0, 70.0):
        rig.round(trains(1, held_s), job(3, state="PENDING", nodes=(), gpus=2, user="eve"))
    rig.store.record([Switched(VERSION, "n1", 1, 0, "yield", 3605.0, 0.1, 0.1, 0.2, 1, None, "")])
    rig.again()
    rig.round(trains(1, 80.0))
    with StoreReader(rig.path) as reader:
        rows = {(row.user, row.hour): row for row in reader.hours(0.0, 9999.0)}
        assert reader.watched() == {0: pytest.approx(10.0), 1: pytest.approx(20.0)}
        assert reader.last_round_s() == 3620.0
    assert rows["ada", 0].gpu_s == pytest.approx(10.0)
    assert (rows["ada", 1].gpu_s, rows["ada", 1].yields) == (pytest.approx(20.0), 1)
    assert (rows["eve", 1].queue_s, rows["eve", 1].gpu_s) == (pytest.approx(10.0), 0.0)
    while rig.store.tidy(10_000.0, 3600.0):
        pass
    with StoreReader(rig.path) as reader:
        assert [row.hour for row in reader.hours(0.0, 9999.0)] == [1, 1]
        assert reader.actions() == ()


def test_a_round_that_cannot_be_written_is_not_counted(rig: Rig) -> None:
    rig.round(trains(1, 50.0))
    rig.round(trains(1, 60.0))
    known = rig.store._accounting.baseline
    rig.store._link.execute("CREATE TRIGGER full BEFORE INSERT ON hours BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    with pytest.raises(Exception, match="disk full"):
        rig.round(trains(1, 70.0))
    assert rig.store._accounting.baseline is known
    rig.store._link.execute("DROP TRIGGER full")
    rig.round(trains(1, 80.0))
    with StoreReader(rig.path) as reader:
        assert sum(row.gpu_s for row in reader.hours(0.0, 9999.0)) == pytest.approx(30.0)


def test_open_starts_are_watched_on_by_the_next_service(rig: Rig) -> None:
    long, waits = job(1, gpus=4), job(2, state="PENDING", nodes=(), gpus=2, submit_s=900.0, start_s=None)
    runs = replace(waits, state="RUNNING", nodes=("n1-l1",), start_s=1015.0)
    rig.round(long, waits)
    rig.round(long, runs)
    rig.again()
    rig.round(long, runs)
    rig.round(runs)
    with StoreReader(rig.path) as reader:
        (start,) = reader.starts(0.0, 9999.0)
    assert (start.at_s, start.free_s) == (1015.0, 1030.0)


def test_a_move_to_no_host_in_particular_says_so() -> None:
    moved = Effect(1, "migrate", 1, 0, "ada", 0.0, "makes way", "4 GPUs on node1", "")
    assert effect_sentence(moved) == "migrate from 4 GPUs on node1 to where Slurm starts it: being measured"
