"""The store: written ahead, verified later, replayable to the byte, and never lost to corruption."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_rig import books, job, node

from cadenza.policies.core.actions import (
    DrainNode,
    MakeWay,
    OpenNode,
    Outcome,
    Place,
    Release,
    Requeue,
    Resume,
    Suspend,
    Unsuspend,
    Yield,
)
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Host, Job, JobKey, JobUsage, Lease, Options, Progress
from cadenza.policies.core.profile import Profile, linked
from cadenza.policies.guard import Guarded
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.orders import VERSION, LeaseLog, Switched
from cadenza.slurm_plugin.errors import AlreadyRunningError, StoreError
from cadenza.slurm_plugin.service.agents.agent_registry import Event
from cadenza.slurm_plugin.service.failover.lock import StoreLock
from cadenza.slurm_plugin.service.settings import Settings, from_record, load_settings, policy, to_record
from cadenza.slurm_plugin.service.store import record_codec, schema
from cadenza.slurm_plugin.service.store.reader import LargestState, StoreReader
from cadenza.slurm_plugin.service.store.verification import verdict
from cadenza.slurm_plugin.service.store.writer import SqliteStore

A, B = JobKey(1, 0), JobKey(2, 0)
PROFILE = linked({gpu: Profile("net", 0.5, (1.0, 2.0), (1.0,), ((0.5,), (1.0,)), gpu=gpu) for gpu in ("a100", "v100")})[
    "a100"
]


def open_store(folder: Path) -> SqliteStore:
    return SqliteStore(folder / "cadenza.db", SystemClock())


def allow(*actions: object) -> tuple[Guarded, ...]:
    return tuple(Guarded(action, allowed=True) for action in actions)  # type: ignore[arg-type]


def test_round_survives_a_crash_before_its_actions(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    action = Suspend(A, "its turn is over")
    memory = Memory(suspended=frozenset({A}), last_yield_s={A: 5.0})
    store.begin(books(job(1)), Decision((action,), Memory(), {A: "waits"}), allow(action), memory)
    # no finish and no close: the process is gone; a second connection sees what was committed
    again = open_store(tmp_path)
    assert again.memory() == memory
    with StoreReader(tmp_path / "cadenza.db") as reader:
        last = reader.round()
        assert last is not None
        assert last.seconds is None
        assert reader.actions()[0].ok is None
        assert reader.job_record(1).reason == "waits"


def test_an_action_on_several_jobs_is_on_the_record_of_each(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    way = MakeWay((A, B), (-5, -5), JobKey(9, 0), "makes way for job 9")
    alone = Suspend(B, "its turn is over")
    number = store.begin(books(job(1), job(2)), Decision((way, alone), Memory()), allow(way, alone), Memory())
    store.finish(number, [(way, Outcome(ok=True)), (alone, Outcome(ok=True))], 0.1)
    with StoreReader(tmp_path / "cadenza.db") as reader:
        assert [row.kind for row in reader.job_record(A.id).actions] == ["MakeWay"]
        assert [row.kind for row in reader.job_record(B.id).actions] == ["Suspend", "MakeWay"]
        assert reader.job_record(9).actions == ()


def test_interrupted_release_is_forgotten(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    action = Release(A, "held for us")
    store.begin(books(job(1)), Decision((action,), Memory()), allow(action), Memory(placed=frozenset({A, B})))
    assert open_store(tmp_path).memory().placed == {B}


def test_outcomes_and_verification(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    actions = (Suspend(A, "over"), Suspend(B, "over"))
    number = store.begin(books(job(1), job(2)), Decision(actions, Memory()), allow(*actions), Memory())
    store.finish(number, [(actions[0], Outcome(ok=True)), (actions[1], Outcome(ok=False, error="no"))], 0.1)
    later = replace(books(job(1, state="SUSPENDED"), job(2)), time_s=103.0)
    store.begin(later, Decision((), Memory()), (), Memory())
    with StoreReader(tmp_path / "cadenza.db") as reader:
        second, first = reader.actions()
        assert (first.ok, first.verified) == (True, "verified")
        assert (second.ok, second.error, second.verified) == (False, "no", None)


def test_blocked_actions_are_recorded_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    blocked = (Guarded(Yield(A, "slice over"), allowed=False, reason="observe-only"),)
    for _ in range(3):
        store.begin(books(job(1)), Decision((blocked[0].action,), Memory()), blocked, Memory())
    with StoreReader(tmp_path / "cadenza.db") as reader:
        assert [(row.allowed, row.rule) for row in reader.actions()] == [(False, "observe-only")]


def test_the_largest_state_is_of_a_yield_or_a_checkpoint_and_the_speed_of_all_checkpoints(tmp_path: Path) -> None:
    store = open_store(tmp_path)

    def switched(job: int, kind: str, copy_s: float, nbytes: int) -> Switched:
        return Switched(VERSION, "n1", job, 0, kind, 50.0, 0.1, copy_s, 4.0, nbytes, 0.3, "")

    def largest() -> LargestState | None:
        with StoreReader(tmp_path / "cadenza.db") as reader:
            return reader.largest_state()

    store.record([switched(1, "resume", 0.5, 0)])
    assert largest() is None
    store.record([switched(2, "yield", 1.0, 2**62), switched(3, "yield", 1.0, 1 << 30)])
    assert largest() == LargestState(2, 2**62, None)
    store.record([switched(4, "checkpoint", 3.0, 2 << 30), switched(5, "checkpoint", 1.0, 2 << 30)])
    assert largest() == LargestState(2, 2**62, float(1 << 30))


def test_agents_messages_are_on_record(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    switched = Switched(VERSION, "n1", 1, 0, "yield", 50.0, 0.1, 0.2, 0.4, 10**9, 0.3, "")
    stretch = LeaseLog(VERSION, "n1", 1, 0, (0, 3), 10.0, 50.0)
    store.record([switched, stretch, Event(50.0, "state", "n1", 1, 0, "held -> yielded")])
    with StoreReader(tmp_path / "cadenza.db") as reader:
        assert reader.switches(job=1)[0].copy_s == 0.2
        assert reader.leases()[0].gpus == (0, 3)
        assert reader.events(since_s=50.0)[0].detail == "held -> yielded"
        assert reader.events(since_s=51.0) == ()
        assert reader.job_record(1).exists
        assert not reader.job_record(7).exists


def tidy(store: SqliteStore, before_s: float) -> None:
    while store.tidy(before_s, before_s):
        pass


def test_old_rows_go_and_the_last_round_stays(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for time_s in (10.0, 20.0):
        store.begin(replace(books(), time_s=time_s), Decision((), Memory()), (), Memory())
    store.record([Event(10.0, "state", "n1")])
    tidy(store, 1000.0)
    with StoreReader(tmp_path / "cadenza.db") as reader:
        last = reader.round()
        assert last is not None
        assert last.at_s == 20.0


def test_corrupt_file_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "cadenza.db"
    path.write_bytes(b"this is no database" * 1000)
    store = open_store(tmp_path)
    assert store.fresh
    assert store.put_aside is not None
    assert store.put_aside.read_bytes().startswith(b"this is no database")


def test_damaged_pages_are_put_aside(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for _ in range(50):
        store.begin(books(*(job(n) for n in range(20))), Decision((), OURS), (), OURS)
    store.close()
    path = tmp_path / "cadenza.db"
    data = bytearray(path.read_bytes())
    data[4096:16384] = b"\xff" * 12288
    path.write_bytes(data)
    again = open_store(tmp_path)
    assert again.put_aside is not None
    assert (again.memory(), again.fresh) == (OURS, False)


HOSTILE = {
    "surrogate": job(1, name="\ud800"),
    "no number": job(1, run_s=float("nan"), submit_s=float("inf")),
    "too large": job(1, options=Options(duration_s=10.0**12)),
}


@pytest.mark.parametrize("bad", HOSTILE.values(), ids=HOSTILE)
def test_a_round_that_would_not_read_back_is_not_written(tmp_path: Path, bad: Job) -> None:
    store = open_store(tmp_path)
    ours = Memory(suspended=frozenset({A}))
    store.begin(books(job(2)), Decision((), ours), (), ours)
    with pytest.raises(record_codec.UNREADABLE):
        store.begin(books(bad), Decision((), Memory()), (), Memory())
    assert open_store(tmp_path).memory() == ours
    with StoreReader(tmp_path / "cadenza.db") as reader:
        last = reader.round()
        assert last is not None
        assert last.number == 1


OURS = Memory(suspended=frozenset({A}), placed=frozenset({B}), held={JobKey(3, 1): 5.0}, drained=frozenset({"n1-l1"}))


@pytest.mark.parametrize("damage", [b"", b"no zlib", record_codec.pack(b'{"time_s":1e999}')])
def test_what_is_ours_needs_no_snapshot(tmp_path: Path, damage: bytes) -> None:
    """The service starts, and every reading command works, whatever the last rounds have become."""
    store, path = open_store(tmp_path), tmp_path / "cadenza.db"
    lasting = replace(OURS, last_yield_s={A: 5.0})
    store.begin(books(job(1)), Decision((), Memory(), {A: "first"}), (), Memory())
    store.begin(books(job(1)), Decision((), lasting, {A: "second"}), (), lasting)
    columns = "snapshot = ?1, memory = ?1, before = ?1, decision = ?1"
    store._link.execute(f"UPDATE rounds SET {columns} WHERE number = 2", (damage,))
    store.close()
    assert schema.read_undo(path) == OURS
    again = open_store(tmp_path)
    assert (again.memory(), again.fresh, again.last_snapshot()) == (OURS, False, None)
    with StoreReader(path) as reader:
        last, record = reader.round(), reader.job_record(1)
        assert last is not None
        assert (last.number, record.reason) == (1, "second")
        with pytest.raises(StoreError, match="round 2 cannot be read"):
            reader.round(2)
    assert again.begin(books(job(1)), Decision((), OURS), (), OURS) == 3


def test_what_is_ours_may_come_from_the_last_round(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.begin(books(job(1)), Decision((), OURS), (), OURS)
    store._link.execute("UPDATE undo SET record = x'00'")
    again = open_store(tmp_path)
    assert (again.memory(), again.fresh) == (OURS, False)
    again._link.execute("DELETE FROM rounds")
    assert open_store(tmp_path).fresh


def test_what_is_ours_is_read_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store._link.execute("CREATE TRIGGER flip AFTER INSERT ON undo BEGIN UPDATE undo SET record = x'00'; END")
    with pytest.raises(StoreError, match="read back"):
        store.begin(books(), Decision((), Memory()), (), OURS)


def test_a_newer_store_still_says_what_is_ours(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.begin(books(), Decision((), OURS), (), OURS)
    store._link.execute("PRAGMA user_version=99")
    store._link.execute("DROP TABLE rounds")
    store.close()
    assert schema.read_undo(tmp_path / "cadenza.db") == OURS


def test_what_is_ours_is_read_where_sqlite_can_make_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk, after a service that was killed: neither the index of the log nor the lock's note has room."""
    path = tmp_path / "cadenza.db"
    store = open_store(tmp_path)
    store.begin(books(), Decision((), Memory()), (), OURS)
    files = {name: path.with_name(name).read_bytes() for name in ("cadenza.db", "cadenza.db-wal")}
    store.close()
    for name, data in files.items():
        path.with_name(name).write_bytes(data)
    path.with_name("cadenza.db-shm").symlink_to(tmp_path / "away" / "shm")
    with pytest.raises(StoreError):
        open_store(tmp_path)
    assert schema.read_undo(path) == OURS

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    lock = StoreLock(path)
    lock.take()
    lock.release()


def test_one_bad_report_costs_itself_only(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    good = LeaseLog(VERSION, "n1", 1, 0, (0, 3), 10.0, 50.0)
    bad = [
        LeaseLog(VERSION, "n1", 2, 2**63, (0,), 10.0, 50.0),
        Switched(VERSION, "n1", 2, 0, "yield", 1e300, 0.1, 0.2, 0.4, 2**63, 0.3, ""),
        Switched(VERSION, "n1", 2**64, 0, "yield", 50.0, 0.1, 0.2, 0.4, 1, 0.3, ""),
        Switched(VERSION, "n1", 2, 0, "yield", float("inf"), 0.1, 0.2, 0.4, 1, 0.3, ""),
        Event(50.0, "state", "n1", 1, 0, "\ud800"),
    ]
    assert store.record([*bad, good]) == len(bad)
    assert store.record([good]) == 0
    with StoreReader(tmp_path / "cadenza.db") as reader:
        assert [row.job for row in reader.leases()] == [1, 1]
        assert (reader.switches(), reader.events()) == ((), ())


def test_the_record_is_for_its_group_only(tmp_path: Path) -> None:
    store, path = open_store(tmp_path), tmp_path / "cadenza.db"
    store.begin(books(), Decision((), Memory()), (), Memory())
    assert {each.stat().st_mode & 0o777 for each in tmp_path.glob("cadenza.db*")} == {0o640}
    store.close()
    path.chmod(0o644)
    open_store(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o640


def crowded(number: int, now_s: float) -> ClusterSnapshot:
    crowd = books(*(job(n, name=f"{random.Random(n * number).getrandbits(400):x}") for n in range(20)))  # noqa: S311
    return replace(crowd, time_s=now_s)


def test_the_oldest_rounds_make_room(tmp_path: Path) -> None:
    store, path, now_s = open_store(tmp_path), tmp_path / "cadenza.db", SystemClock().now()
    store.max_bytes = 400_000
    for number in range(200):
        told = crowded(number, now_s - 200.0 + number)
        store.finish(store.begin(told, Decision((), OURS), (), OURS), (), 0.1)
        store._frame_s -= 150.0  # key frames come as if a round took minutes
        tidy(store, 0.0)
    with StoreReader(path) as reader:
        first, last = reader._rows("SELECT min(number), max(number) FROM rounds", ())[0]
        assert reader.round(last) is not None
    assert 180 > first > 1
    assert last == 200
    store.close()
    assert path.stat().st_size < 500_000
    assert store.memory() == OURS


def test_all_rounds_of_an_hour_stay_and_key_frames_by_their_age(tmp_path: Path) -> None:
    store, now_s = open_store(tmp_path), SystemClock().now()
    slot_s, step_s = 4 * 3600.0, 150.0
    for at_s in [now_s - 2 * 86400.0 + step_s * at for at in range(1152)]:
        store.finish(
            store.begin(replace(books(job(1, run_s=at_s)), time_s=at_s), Decision((), OURS), (), OURS), (), 0.1
        )
        if store._snapshot is not None and store._snapshot.time_s - store._frame_s >= 900.0:
            store.tidy(0.0, 0.0)
    tidy(store, now_s - 14 * 86400.0)
    with StoreReader(tmp_path / "cadenza.db") as reader:
        kept = [row["at_s"] for row in reader._rows("SELECT at_s FROM rounds ORDER BY number", ())]
        numbers = [row["number"] for row in reader._rows("SELECT number FROM rounds", ())]
        assert all(reader.round(number) is not None for number in numbers)
    ages = [now_s - at_s for at_s in kept]
    assert sum(age <= 3600.0 for age in ages) in (23, 24, 25)
    assert sum(3600.0 < age <= 86400.0 for age in ages) in range(90, 95)
    old = [int(at_s // slot_s) for at_s, age in zip(kept, ages, strict=True) if age > 86400.0]
    assert len(old) == len(set(old))
    assert len(old) in (6, 7)


def test_a_round_that_is_told_from_a_key_frame_is_read_as_it_was(tmp_path: Path) -> None:
    """Random rounds: jobs, nodes and hosts come, go and change, with leases, progress, profiles and reasons."""
    draw, store, written = random.Random(5), open_store(tmp_path), {}  # noqa: S311
    jobs: dict[int, Job] = {}
    memory, now_s = Memory(), SystemClock().now() - 100.0
    for number in range(40):
        for which in draw.sample(range(12), 4):
            one = jobs.get(which)
            if one is None or draw.random() < 0.3:
                jobs[which] = job(which, node=draw.choice(("", "n1", "n1-l1")), user="\u20acva")
            elif draw.random() < 0.2:
                del jobs[which]
            else:
                lease_ = draw.choice((None, Lease("held", (Gpu("n1", 0),), held_s=draw.random(), use=JobUsage())))
                progress = draw.choice((None, Progress(float(number), attained_on={"a100": draw.random()})))
                restart = one.key.restart + (draw.random() < 0.1)
                jobs[which] = replace(one, key=JobKey(which, restart), lease=lease_, progress=progress,
                                      profile=draw.choice((None, PROFILE)), run_s=draw.choice((None, 3.0)))  # fmt: skip
        nodes = tuple(node(name, gpus_used=draw.randrange(3)) for name in ("n1", "n2") if draw.random() < 0.8)
        hosts = tuple(Host(name, agent_alive=draw.random() < 0.5) for name in ("n1", "n2") if draw.random() < 0.8)
        ordered = tuple(sorted(jobs.values(), key=lambda one: one.key))
        seen = replace(books(*ordered, nodes=nodes), hosts=hosts, time_s=now_s + number)
        if draw.random() < 0.1:
            seen = replace(seen, jobs=seen.jobs[::-1])
        before, memory = memory, replace(memory, suspended=frozenset(key.key for key in ordered if draw.random() < 0.3),
                                         usage={"team": draw.random()})  # fmt: skip
        reasons = {one.key: draw.choice(("waits", f"holds for {number} s")) for one in seen.jobs}
        store.adopt(before)
        decision = Decision((Yield(A, "r"),) * (number % 2), replace(memory, usage_s=float(number)), reasons)
        written[store.begin(seen, decision, (), memory)] = seen, before, decision, memory
        if number % 15 == 14:
            store._frame_s = 0.0
            store.tidy(0.0, 0.0)
    with StoreReader(tmp_path / "cadenza.db") as reader:
        for number, expected in written.items():
            found = reader.round(number)
            assert found is not None
            whole = record_codec.encode_snapshot(expected[0])
            assert record_codec.encode_snapshot(found.snapshot) == record_codec.encode_snapshot(
                record_codec.decode_snapshot(whole)
            )
            assert (found.before, found.decision, found.memory) == expected[1:]
        bases = [row["base"] for row in reader._rows("SELECT base FROM rounds", ())]
    assert 3 <= sum(base is None for base in bases) <= 15
    last = open_store(tmp_path).last_snapshot()
    assert last is not None
    assert [one.key for one in last.jobs] == [one.key for one in seen.jobs]


def test_a_newer_store_is_put_aside_and_what_is_ours_taken_over(tmp_path: Path) -> None:
    store, path = open_store(tmp_path), tmp_path / "cadenza.db"
    store.begin(books(job(1)), Decision((), OURS), (), OURS)
    store._link.execute("PRAGMA user_version=99")
    store.close()
    with pytest.raises(StoreError, match="version 99"):
        StoreReader(path)
    again = open_store(tmp_path)
    assert (again.memory(), again.fresh) == (OURS, False)
    assert again.put_aside is not None
    assert schema.read_undo(again.put_aside) == OURS, "the record is kept"
    assert again.begin(books(job(1)), Decision((), OURS), (), OURS) == 1


def test_missing_store_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="run this on the machine of cadenzad"):
        StoreReader(tmp_path / "none.db")


def test_closed_store_is_readable_without_write_access(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.begin(books(job(1)), Decision((), Memory()), (), Memory())
    store.close()
    assert not (tmp_path / "cadenza.db-wal").exists()
    with StoreReader(tmp_path / "cadenza.db") as reader:
        assert reader.round() is not None
    assert not (tmp_path / "cadenza.db-wal").exists()


def test_lock_belongs_to_one_living_process(tmp_path: Path) -> None:
    lock = StoreLock(tmp_path / "cadenza.db")
    assert lock.owner() is None
    program = (
        "import sys, pathlib; from cadenza.slurm_plugin.service.failover.lock import StoreLock\n"
        "StoreLock(pathlib.Path(sys.argv[1])).take(); print('mine', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "cadenza.db")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"mine\n"
        assert lock.owner() == other.pid
        with pytest.raises(AlreadyRunningError, match=str(other.pid)):
            lock.take()
        other.kill()
        other.wait()
    lock.take()
    lock.release()


# --- Replay ---


def busy_cluster() -> ClusterSnapshot:
    """Two jobs on one GPU whose turn is over, one suspended by us, one held for us, one unmanaged."""

    def held(state: str, vtime_s: float) -> Lease:
        return Lease(state, (Gpu("n1", 0),), vtime_s, 99.0 if state == "held" else 0.0, ready=True)  # type: ignore[arg-type]

    return replace(
        books(
            job(3, lease=held("held", 50.0)),
            job(1, node="n1-l1", lease=held("yielded", 2.25)),
            job(2, node="n1-l1", state="SUSPENDED", lease=held("yielded", 3.5)),
            job(4, state="PENDING", slurm_priority=0, nodes=()),
            job(5, options=None, partition="other"),
            nodes=(node("n1"), node("n1-l1", 1, drained=True, drain_reason="cadenza: test")),
        ),
        hosts=(Host("n1", agent_alive=True),),
    )


def test_replay_gives_the_same_decision_byte_for_byte(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        "[service]\nmode='apply'\n[guard]\npartitions=['gpu']\n[expert]\nmin_run_s=0\n[policy]\norder='fifo'\nshare='timeslice'\n",
        encoding="utf-8",
    )
    settings = load_settings(config)
    store = open_store(tmp_path)
    store.use_settings(to_record(settings))
    before = Memory(frozenset({B}), frozenset({A}), frozenset({"n1-l1"}), {JobKey(3, 0): 0.1, A: 0.2})
    store.adopt(before)
    snapshot = busy_cluster()
    decision = policy(settings)(snapshot, before)
    assert {type(action) for action in decision.actions} >= {Yield, OpenNode}
    store.begin(snapshot, decision, allow(*decision.actions), Memory())
    with StoreReader(tmp_path / "cadenza.db") as reader:
        found = reader.round()
    assert found is not None
    assert (found.snapshot, found.before, found.decision) == (snapshot, before, decision)
    replayed = policy(from_record(found.settings))(found.snapshot, found.before)
    assert record_codec.encode_decision(replayed) == record_codec.encode_decision(decision)


KEYS = st.builds(JobKey, st.integers(1, 9), st.integers(0, 2))
ACTIONS = st.one_of(
    *(st.builds(kind, KEYS, st.text()) for kind in (Yield, Resume, Suspend, Unsuspend, Release)),
    st.builds(Requeue, KEYS, st.booleans(), st.text()),
    st.builds(Place, KEYS, st.tuples(st.text()), st.text(), st.none() | st.integers(1, 9)),
    st.builds(DrainNode, st.text(), st.text()),
    st.builds(OpenNode, st.text(), st.text()),
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
MEMORIES = st.builds(
    Memory, st.frozensets(KEYS), st.frozensets(KEYS), st.frozensets(st.text()), st.dictionaries(KEYS, FLOATS)
)
DECISIONS = st.builds(Decision, st.lists(ACTIONS).map(tuple), MEMORIES, st.dictionaries(KEYS, st.text(), max_size=5))


@given(DECISIONS)
def test_decisions_round_trip(decision: Decision) -> None:
    data = record_codec.encode_decision(decision)
    assert record_codec.decode_decision(data) == decision
    assert record_codec.encode_decision(record_codec.decode_decision(data)) == data


# --- Verification ---


def seen(action: object, *jobs: object, now_s: float = 200.0, nodes: tuple = (node("n1"),)) -> str | None:
    snapshot = ClusterSnapshot(now_s, nodes, jobs, (Host("n1", agent_alive=True),))  # type: ignore[arg-type]
    return verdict(action, snapshot, 100.0)  # type: ignore[arg-type]


def test_verdicts() -> None:
    gpus = (Gpu("n1", 0),)
    assert seen(Suspend(A, ""), job(1)) == "failed"
    assert seen(Suspend(A, ""), job(1), now_s=101.0) is None
    assert seen(Suspend(A, "")) == "gone"
    assert seen(Unsuspend(A, ""), job(1)) == "verified"
    assert seen(Yield(A, ""), job(1, lease=Lease("yielded", gpus))) == "verified"
    assert seen(Yield(A, ""), job(1, lease=Lease("held", gpus))) is None
    assert seen(Yield(A, ""), job(1, lease=Lease("held", gpus)), now_s=300.0) == "failed"
    assert seen(Resume(A, ""), job(1, lease=Lease("held", gpus))) == "verified"
    assert seen(Release(A, ""), job(1, state="PENDING", slurm_priority=0)) == "failed"
    assert seen(Requeue(A, hold=True, reason=""), job(1, key=JobKey(1, 1))) == "verified"
    way = MakeWay((JobKey(9, 0), A), (-5, -5), B, "")
    assert seen(way, job(1, key=JobKey(1, 1))) == "verified"
    assert seen(way, job(1)) == "failed", "one of them still runs"
    assert seen(DrainNode("n1", ""), nodes=(node("n1", drained=True),)) == "verified"
    assert seen(OpenNode("n1", ""), nodes=(node("n1", drained=True),)) == "failed"


def test_settings_default_is_recorded(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for _ in range(2):
        store.use_settings(to_record(Settings()))
        store.begin(books(), Decision((), Memory()), (), Memory())
    assert store._link.execute("SELECT count(*) FROM settings").fetchone()[0] == 1
