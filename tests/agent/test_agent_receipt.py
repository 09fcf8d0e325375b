"""Receipts on a host: told to the ranks of a moved job, made of a complete checkpoint, and jobs that train without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from host_rig import HostInMemory

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import orders, wire
from cadenza.sidecar.agent.ipc import mounts
from cadenza.sidecar.agent_settings import AgentSettings, AgentTable

KEPT = orders.Receipt(restart=1, step=30, paths=("/kept/step-00000030",), left_s=1000.0)


class MovedJob(HostInMemory):
    """A host to which job 1 has been moved: it has restarted once."""

    key = JobKey(1, 1)

    def facts(self, at_s: float = 1040.0, **fields: Any) -> None:
        known = {"managed": True, "weight": 1.0, "priority": 0, "user": "u", "hosts": 1, **fields}
        self.service.obey(
            orders.Facts(1, (orders.JobFacts(1, 1, **known),), 60.0, share_between_users=False, enforce=True, at_s=at_s)
        )

    def starts(self) -> Any:
        """Register the job, give it its lease, and attach its rank."""
        self.register(1, [0], restart=1)
        self.run_once()
        session = self.attach(1, os.getpid(), restart=1)
        self.run_once()
        return session

    def told(self, session: Any, kind: str) -> Any:
        return [message["receipt"] for message in self.said(session) if message["type"] == kind]

    def report(self) -> orders.LeaseReport:
        return self.run_once().leases[0]

    def saves(self, session: Any, *paths: str, lost_s: float = 0.0) -> orders.LeaseReport:
        """Have the rank save on an order, and return the report after it."""
        run = self.host.jobs[self.key]
        rank = next(iter(run.ranks.values()))
        rank.page._words[wire.PAGE_SAVES] = 1
        rank.page._words[wire.PAGE_STEP] = 40
        order = orders.CheckpointOrder(1, 1, 1, 60.0, 60.0, 300.0, goal="gives its GPUs up for job 14")
        self.service.obey(order)
        for _ in range(3):
            self.run_once()
            if run.stop is None or run.stop.committed:
                break
            self.jobs.handle(session, wire.encode("arrived", order=run.stop.order, step=run.stop.step or 40))
        if run.stop is not None and paths:
            known = {"order": run.stop.order, "step": 40, "seconds": 0.5, "lost_s": lost_s}
            answer = wire.encode("checkpointed", **known, paths=paths)
            self.jobs.handle(session, answer)
        return self.report()


@pytest.fixture
def moved(tmp_path: Path) -> Iterator[MovedJob]:
    rig = MovedJob(tmp_path)
    rig.host.settings = AgentSettings(AgentTable(service="tcp://service:6850"))
    yield rig
    rig.close()


def test_a_rank_hears_with_its_page_what_it_has_to_find_and_how_long_it_was_away(moved: MovedJob) -> None:
    moved.register(1, [0], restart=1)
    moved.facts(receipt=KEPT)
    moved.time.passed += 6.0
    (receipt,) = moved.told(moved.starts(), "attached")
    away_s = receipt.pop("away_s")
    assert receipt == {"restart": 1, "step": 30, "paths": ["/kept/step-00000030"]}
    assert away_s == pytest.approx(46.1)


def test_a_rank_that_attached_before_the_service_knew_hears_it_later_once(moved: MovedJob) -> None:
    session = moved.starts()
    assert moved.told(session, "attached") == [None]
    moved.facts(new=True)
    moved.run_once()
    assert moved.told(session, "receipt") == [], "facts on a job that Slurm's snapshot does not have yet say nothing"
    for _ in range(2):
        moved.facts(receipt=KEPT)
        moved.run_once()
    assert [one["step"] for one in moved.told(session, "receipt")] == [30]


def test_a_job_without_a_receipt_or_an_agent_without_a_service_need_not_be_waited_for(moved: MovedJob) -> None:
    moved.register(1, [0], restart=1)
    moved.facts()
    assert moved.told(moved.starts(), "attached") == [{}]
    moved.begin_anew()
    assert moved.told(moved.starts(), "attached") == [{}], "there is no service that could have moved it"


def test_a_later_program_of_the_job_has_nothing_to_find(moved: MovedJob) -> None:
    moved.register(1, [0], restart=1)
    moved.facts(receipt=KEPT)
    first = moved.starts()
    moved.jobs.handle(first, wire.encode("restored", path="/kept/step-00000030", step=30))
    assert moved.told(moved.attach(1, os.getpid(), restart=1), "attached") == []
    second = moved.attach(1, os.getpid(), restart=1)
    moved.run_once()
    assert moved.told(second, "attached") == [{}]


def test_a_job_that_trains_without_is_not_asked_for_a_checkpoint_again(moved: MovedJob, caplog: Any) -> None:
    moved.register(1, [0], restart=1)
    moved.facts(receipt=KEPT)
    session = moved.starts()
    moved.jobs.handle(session, wire.encode("unrestored", reason="it trains\nwithout"))
    report = moved.saves(session, "/kept/step-00000040")
    assert (report.unrestored, report.note) == ("rank 0: it trains without", "rank 0: it trains without")
    assert (report.checkpoints, report.saves_away, report.saved) == (False, False, False)
    assert "unrestored JOBID=1.1 rank 0: it trains" in caplog.text


def test_why_a_rank_can_save_nothing_yet_is_reported_until_it_can(moved: MovedJob) -> None:
    session = moved.starts()
    moved.jobs.handle(session, wire.encode("unready", reason="its unit of steps\nis not known yet"))
    assert moved.report().unready == "its unit of steps is not known yet"
    moved.jobs.handle(session, wire.encode("unready", reason=""))
    assert moved.report().unready == ""


def test_a_later_start_of_such_a_job_is_not_asked_either(moved: MovedJob) -> None:
    moved.register(1, [0], restart=1)
    moved.facts(receipt=KEPT, unrestored="rank 0: it trains without")
    session = moved.starts()
    assert moved.told(session, "attached") == [{}]
    report = moved.saves(session, "/kept/step-00000040")
    assert (report.unrestored, report.checkpoints) == ("rank 0: it trains without", False)


def test_a_complete_checkpoint_has_a_receipt_and_its_ranks_hear_for_whom_they_save(moved: MovedJob) -> None:
    session = moved.starts()
    report = moved.saves(session, "/kept/step-00000040", "/logs/40")
    assert report.saved
    assert report.receipt == orders.Receipt(restart=2, step=40, paths=("/kept/step-00000040", "/logs/40"))
    goals = [message["goal"] for message in moved.said(session) if message["type"] == "commit"]
    assert goals == ["gives its GPUs up for job 14"]


def test_what_a_move_would_repeat_is_reported_and_then_what_its_checkpoint_does_not_have(moved: MovedJob) -> None:
    session = moved.starts()
    assert moved.report().lost_s == 0
    words = next(iter(moved.host.jobs[moved.key].ranks.values())).page._words
    words[wire.PAGE_LOST_MS] = 12_500
    assert moved.report().lost_s == 12.5
    words[wire.PAGE_LOST_MS] = 2**64 - 1
    report = moved.report()
    assert msgspec.json.decode(msgspec.json.encode(report), type=orders.LeaseReport) == report, "whatever it writes"
    saved = moved.saves(session, "/kept/ckpt.pt", lost_s=14.0)
    assert (saved.saved, saved.lost_s) == (True, 14.0), "it stands since then"


@pytest.mark.parametrize("paths", [tuple(f"/kept/{number}" for number in range(9)), ("/" + "x" * 1001,)])
def test_a_receipt_fits_into_a_packet_or_names_no_path(moved: MovedJob, paths: tuple[str, ...]) -> None:
    receipt = moved.saves(moved.starts(), *paths).receipt
    assert receipt == orders.Receipt(restart=2, step=40, paths=())
    long = orders.Receipt(restart=1, step=2**61, paths=tuple("\u4e2d" * 1000 for _ in range(8)))
    assert len(wire.encode("receipt", receipt=msgspec.to_builtins(long))) < wire.MAX_PACKET


def test_a_save_that_takes_more_than_half_its_time_stalls_and_is_reported_for_a_while(moved: MovedJob) -> None:
    session = moved.starts()
    assert not moved.saves(session).stalls
    moved.time.passed += 31.0
    assert moved.report().stalls
    moved.time.passed += 30.0
    assert moved.report().stalls, "it has just been given up"
    assert moved.host.jobs[moved.key].stop is None
    moved.time.passed += 60.0
    assert not moved.report().stalls


MOUNTS = r"""
22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 0:40 / /home rw - nfs4 nas:/export/home rw
24 22 0:41 / /home/my\040disk rw - ext4 /dev/sdb1 rw
25 22 0:42 / /scratch rw - lustre 10.0.0.1@tcp:/fs1 rw
26 22 0:43 / /scratch/tmp rw - tmpfs tmpfs rw
27 22 0:44 / /data rw - nfs nas:/export/data rw
"""


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/home/ann/kept", "nas"),
        ("/data/kept", "nas"),
        ("/home/my disk/kept", "n1:/dev/sdb1"),
        ("/home/my disks/kept", "nas"),
        ("/scratch/ann", "10.0.0.1@tcp:/fs1"),
        ("/scratch/tmp/x", "n1:/scratch/tmp"),
        ("/homes", "n1:/dev/sda1"),
    ],
)
def test_a_file_system_has_one_name_on_all_hosts_that_share_it(
    path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts.Path, "read_text", lambda *_, **__: MOUNTS)
    assert mounts.file_system_of(path, "n1") == name


def test_the_file_system_of_a_checkpoint_is_in_the_report(moved: MovedJob, tmp_path: Path) -> None:
    expected = mounts.file_system_of(str(tmp_path), "n1")
    assert expected
    assert moved.saves(moved.starts(), str(tmp_path / "step-00000040")).file_system == expected
