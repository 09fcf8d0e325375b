"""The lease table: no GPU twice in any history, virtual time, and the file behind it."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import orders
from cadenza.sidecar.agent.daemon import Daemon
from cadenza.sidecar.agent.errors import LeaseConflictError, StateFileError
from cadenza.sidecar.agent.leases.lease_table import Lease, LeaseTable, Process
from cadenza.sidecar.agent.state_files import LeaseFile, TuningFile
from cadenza.sidecar.agent_settings import AgentSettings, ExpertTable

FACTS = orders.Facts(1, jobs=(), slice_s=9.0, share_between_users=True, enforce=True)


def lease(job: int, *gpus: int, weight: float = 1.0) -> Lease:
    return Lease(job, 0, 1000, gpus, 0.0, weight=weight)


class Histories(RuleBasedStateMachine):
    """Any order of calls, legal or not: an illegal one is refused and changes nothing."""

    jobs = Bundle("jobs")

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.now = 0.0
        self.serial = 0
        self.held: dict[JobKey, float] = {}
        self.shared: set[JobKey] = set()
        """Jobs that shared a GPU, which takes a pack."""

    @rule(target=jobs, gpus=st.sets(st.integers(0, 3), max_size=4), weight=st.sampled_from([0.5, 1.0, 4.0]))
    def register(self, gpus: set[int], weight: float) -> Lease:
        self.serial += 1
        new = self.table.register(lease(self.serial, *gpus, weight=weight), self.now)
        self.held[new.key] = 0.0
        return new

    @rule(seconds=st.floats(0, 100))
    def pass_time(self, seconds: float) -> None:
        for one in self.table:
            self.held[one.key] += seconds if one.occupying else 0.0
        self.now += seconds

    @rule(one=jobs, move=st.sampled_from(["grant", "stop", "keep", "release"]))
    def move(self, one: Lease, move: str) -> None:
        if self.table.get(one.key) is not one:
            return
        before = (one.state, one.since_s)
        free = not self.table.blockers(one)
        legal = {
            "grant": one.state in {"waiting", "yielded"} and free,
            "stop": one.state == "held",
            "keep": one.state == "stopping",
            "release": one.state == "stopping",
        }[move]
        if legal:
            getattr(self.table, move)(one, self.now)
            sharers = [other for other in self.table if other is not one and other.occupying and other.overlaps(one)]
            if move == "grant" and sharers:
                assert all(one.packed_with(other) for other in sharers)
                self.shared |= {one.key, *(other.key for other in sharers)}
        else:
            with pytest.raises(LeaseConflictError):
                getattr(self.table, move)(one, self.now)
            assert (one.state, one.since_s) == before

    @rule(data=st.data())
    def pack(self, data: st.DataObject) -> None:
        keys = [one.key for one in self.table]
        self.table.pack({key: data.draw(st.integers(0, 2)) for key in keys if data.draw(st.booleans())})
        for one in self.table:
            others = [other for other in self.table if other is not one and other.occupying and other.overlaps(one)]
            apart = any(not one.packed_with(other) for other in others)
            assert one.loose == (one.occupying and apart)

    @rule(one=jobs)
    def opt_out(self, one: Lease) -> None:
        one.managed = False
        self.table.pack({other.key: other.pack for other in self.table})

    @rule(one=consumes(jobs))
    def drop(self, one: Lease) -> None:
        occupied = one.occupying
        stretch = self.table.drop(one, self.now)
        assert (stretch is not None) == occupied
        assert self.table.get(one.key) is None

    @invariant()
    def rivals_are_the_jobs_that_want_a_gpu_of_its(self) -> None:
        for one in self.table:
            wanting = {other.key for other in self.table if other is not one and other.overlaps(one)}
            assert sorted(other.key for other in self.table.rivals(one)) == sorted(wanting)

    @invariant()
    def no_gpu_twice_but_by_a_pack(self) -> None:
        for one, other in combinations([one for one in self.table if one.occupying], 2):
            if not set(one.gpus).isdisjoint(other.gpus):
                same = one.managed and other.managed and one.pack == other.pack > 0
                assert same or (one.loose and other.loose)

    @invariant()
    def who_is_loose_was_packed_and_shares_a_gpu_still(self) -> None:
        for one in self.table:
            if one.loose:
                assert self.table.blockers(one)
                assert one.key in self.shared

    @invariant()
    def what_is_on_disk_is_taken_back(self) -> None:
        LeaseTable(msgspec.convert(msgspec.to_builtins(one), Lease) for one in self.table)

    @invariant()
    def virtual_time_never_goes_back_and_counts_held_time(self) -> None:
        for one in self.table:
            assert one.vtime(self.now) * one.weight >= self.held[one.key] - 1e-6 * (1 + self.now)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_two_leases_on_a_gpu_are_refused_from_disk_too() -> None:
    both = [lease(1, 0, 1), lease(2, 1)]
    for one in both:
        one.state = "held"
    with pytest.raises(LeaseConflictError, match="GPU 1 is leased to 1 and to 2"):
        LeaseTable(both)


def test_a_pack_holds_its_gpus_together_and_is_loosened_until_one_is_left() -> None:
    table = LeaseTable()
    one, other, third = (table.register(lease(job, 0), 0.0) for job in (1, 2, 3))
    table.pack({one.key: 1, other.key: 1})
    for each in (one, other):
        table.grant(each, 0.0)
    with pytest.raises(LeaseConflictError, match=r"GPUs .* are still held by 1, 2"):
        table.grant(third, 0.0)
    table.pack({third.key: 1})
    assert (one.loose, other.loose, third.loose) == (True, True, False)
    table.stop(other, 1.0)
    table.release(other, 2.0)
    assert not one.loose
    with pytest.raises(LeaseConflictError):
        table.grant(other, 3.0)


def test_a_job_that_does_not_opt_in_never_shares() -> None:
    table = LeaseTable()
    one, exclusive = (table.register(lease(job, 0), 0.0) for job in (1, 2))
    exclusive.managed = False
    table.pack({one.key: 1, exclusive.key: 1})
    table.grant(one, 0.0)
    with pytest.raises(LeaseConflictError):
        table.grant(exclusive, 0.0)


def test_a_newcomer_starts_at_the_least_virtual_time_that_it_meets() -> None:
    table = LeaseTable()
    first = table.register(lease(1, 0), 0.0)
    table.grant(first, 0.0)
    exclusive = lease(5, 0)
    exclusive.managed = False
    table.register(exclusive, 0.0)
    assert table.register(lease(2, 0), 50.0).vtime(50.0) == 50.0
    assert table.register(lease(3, 1), 50.0).vtime(50.0) == 0.0


def test_held_time_counts_by_weight() -> None:
    table = LeaseTable()
    heavy = table.register(lease(1, 0, weight=4.0), 0.0)
    table.grant(heavy, 10.0)
    table.stop(heavy, 20.0)
    stretch = table.release(heavy, 30.0)
    assert heavy.vtime(99.0) == 5.0
    assert (stretch.from_s, stretch.to_s) == (10.0, 30.0)


def test_the_file_keeps_everything(tmp_path: Path) -> None:
    file = LeaseFile(tmp_path / "deep", "boot", tmp_path)
    one = lease(1, 0, 3)
    one.processes = (Process(12, 345, batch=True),)
    one.state = "yielded"
    file.write((one,), FACTS)
    saved = file.read()
    assert saved.leases == (one,)
    assert saved.facts == FACTS
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["leases.json"]


def test_while_the_disk_is_full_the_leases_are_in_memory_and_a_restarted_agent_finds_the_newest(tmp_path: Path) -> None:
    state, memory = tmp_path / "state", tmp_path / "run"
    LeaseFile(state, "boot", memory).write((lease(1, 0),), FACTS)
    (state / "leases.tmp").mkdir()  # as a full disk: no new file can be written
    file = LeaseFile(state, "boot", memory)
    assert [one.job for one in file.read().leases] == [1]
    file.write((lease(2, 0),), FACTS)
    assert "cannot be written" in file.fault
    assert [one.job for one in LeaseFile(state, "boot", memory).read().leases] == [2]
    (state / "leases.tmp").rmdir()
    file.write((lease(3, 0),), FACTS)
    assert file.fault == ""
    assert [one.job for one in LeaseFile(state, "boot", memory).read().leases] == [3]


def test_after_a_reboot_no_lease_is_left_but_the_rules_are(tmp_path: Path) -> None:
    LeaseFile(tmp_path, "yesterday", tmp_path / "run").write((lease(1, 0),), FACTS)
    saved = LeaseFile(tmp_path, "today", tmp_path / "run").read()
    assert saved.leases == ()
    assert saved.facts == FACTS


def test_facts_of_another_wire_version_are_dropped_and_the_leases_kept(tmp_path: Path) -> None:
    """As after an upgrade of the agent: the facts of the one before may have any form."""
    LeaseFile(tmp_path, "boot", tmp_path / "run").write((lease(1, 0),), FACTS)
    path = tmp_path / "leases.json"
    content = msgspec.json.decode(path.read_bytes())
    for facts in ({**content["facts"], "v": orders.VERSION + 1}, {"v": orders.VERSION - 1, "rows": 3}, 17):
        path.write_bytes(msgspec.json.encode({**content, "facts": facts}))
        saved = LeaseFile(tmp_path, "boot", tmp_path / "run").read()
        assert [one.job for one in saved.leases] == [1]
        assert saved.facts is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"v":1}', b'{"v":7,"boot":"b"}', b"\xff"])
def test_a_spoilt_file_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "leases.json").write_bytes(content)
    with pytest.raises(StateFileError, match=r"leases\.json: .*move it away"):
        LeaseFile(tmp_path, "b", tmp_path / "run").read()


@pytest.mark.parametrize("content", [b"", b"{", b'{"v":7,"boot":"b"}', b"\xff"])
def test_an_agent_starts_without_the_files_that_it_cannot_read(tmp_path: Path, content: bytes) -> None:
    """They are a hint: the steps, the handover files and the driver say who has the GPUs."""
    (tmp_path / "leases.json").write_bytes(content)
    LeaseFile(tmp_path / "run", "b", tmp_path).write((lease(1, 0),), FACTS)
    file = LeaseFile(tmp_path, "b", tmp_path / "run")
    assert [one.job for one in file.recover().leases] == [1], "the other file is good"
    assert (tmp_path / "leases.unreadable").read_bytes() == content
    (tmp_path / "tuning.json").write_bytes(content)
    assert TuningFile(tmp_path, "b").recover() == ()
    assert (tmp_path / "tuning.unreadable").read_bytes() == content
    for name in ("leases.json", "tuning.json"):
        (tmp_path / name).write_bytes(content)
    own = ExpertTable(host="n1", socket=str(tmp_path / "agent.sock"), state_dir=str(tmp_path))
    daemon = Daemon(AgentSettings(expert=own), "1")
    daemon.close()


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateFileError, match="cannot be written"):
        LeaseFile(tmp_path / "file", "b", tmp_path / "file").write((), None)


def test_a_process_with_the_same_pid_and_another_start_is_another_one() -> None:
    one = lease(1, 0)
    one.processes = (Process(10, 100), Process(11, 100), Process(12, 100))
    starts = {10: 100, 11: 101}
    assert one.running_processes(starts.get) == (Process(10, 100),)
